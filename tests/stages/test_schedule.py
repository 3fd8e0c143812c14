"""The learning rate is a function of finished steps, so a resumed run can't jump ahead."""

import pytest

from stages.update.config import UpdateConfig
from stages.update.schedule import learning_rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("linear", 6.0e-4), ("cosine", 6.545085e-4), ("constant", 1e-3)],
)
def test_learning_rate_after_four_of_ten_steps_is_the_worked_number(schedule, expected):
    config = UpdateConfig(lr=1e-3, lr_schedule=schedule)
    assert learning_rate(config, 4, 10) == pytest.approx(expected, abs=1e-10)


def test_learning_rate_in_warm_up_rises_to_its_peak_and_falls_after():
    config = UpdateConfig(lr=1e-3, lr_schedule="linear", lr_warmup_steps=2, min_lr=1e-4)
    rates = [learning_rate(config, finished, 6) for finished in range(7)]
    expected = [5e-4, 1e-3, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4]
    assert rates == pytest.approx(expected, abs=1e-12)
