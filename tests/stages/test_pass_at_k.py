"""pass@k against counting every draw."""

from itertools import combinations

import pytest

from stages.pass_at_k import mean_pass_at_k, pass_at_k


@pytest.mark.parametrize("num_samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one(num_samples: int) -> None:
    for num_right in range(num_samples + 1):
        is_right = [n < num_right for n in range(num_samples)]
        for k in range(1, num_samples + 1):
            draws = [any(draw) for draw in combinations(is_right, k)]
            expected = sum(draws) / len(draws)
            assert pass_at_k(num_samples, num_right, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_many_samples_stays_a_chance() -> None:
    # C(10000, 5000) has 3,008 digits: no float holds it.
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


def test_pass_at_k_of_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="k is 3, and there are 2 samples"):
        pass_at_k(2, 1, 3)


def test_mean_pass_at_k_leaves_out_and_counts_prompts_of_too_few_samples() -> None:
    assert mean_pass_at_k([(4, 2), (1, 1), (2, 0)], 2) == (pytest.approx((5 / 6 + 0) / 2), 1)
    assert mean_pass_at_k([(1, 1)], 2) == (None, 1)
