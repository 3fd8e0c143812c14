"""The weights of a step's tokens: one sum over all, whatever the split."""

import numpy as np
import pytest

from made_samples import samples_of
from stages.update.aggregation import pair_weights, token_weights
from stages.update.config import UpdateConfig
from stages.update.samples import split_minibatches
from stages.update.step import microbatches_of, plan_step

LENGTHS = [2, 8, 4, 2]
LOSSES = [1, 0.5, 0.25, 2]  # of each token of the four answers


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", 0.6875),
        ("sequence_mean", 0.9375),
        ("sequence_sum", 11 / 4),
        ("fixed_length", 11 / 4 / 16),
    ],
)
def test_token_weights_of_unequal_answers_give_the_worked_mean(aggregation, expected):
    weights = token_weights(dict(enumerate(LENGTHS)), aggregation, 16)
    total = sum(weights[i] * LOSSES[i] * n for i, n in enumerate(LENGTHS))
    assert total == pytest.approx(expected)


def shares(max_tokens, ranks, order):
    """Each rank's part of the token mean, over its micro-batches."""
    samples = samples_of([[3] * LENGTHS[i] for i in order])
    step = plan_step(samples, range(4), UpdateConfig(kl_coef=0.1))
    losses = [LOSSES[i] for i in order]
    parts = []
    for rank in range(ranks):
        microbatches = microbatches_of(samples, step.units, max_tokens, rank, ranks)
        taken = [i for members in microbatches for i in members]
        parts.append(sum(step.scale[i] * losses[i] * len(samples.loss_masks[i]) for i in taken))
    return parts


@pytest.mark.parametrize("max_tokens", [1, 12, 18, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [1, 2, 3, 0]])
def test_token_mean_over_micro_batches_and_ranks_is_that_of_the_whole_step(
    max_tokens, ranks, order
):
    assert sum(shares(max_tokens, ranks, order)) == pytest.approx(0.6875)


def test_token_mean_of_two_ranks_is_the_mean_of_the_worked_shares():
    # Answers 1 and 2 on one rank, 3 and 4 on the other: 6 and 5 of 11 over 16 tokens, times 2.
    samples = samples_of([[3] * n for n in LENGTHS])
    scale = plan_step(samples, range(4), UpdateConfig()).scale
    first, second = (
        sum(2 * scale[i] * LOSSES[i] * LENGTHS[i] for i in m) for m in ((0, 1), (2, 3))
    )
    assert (first, second) == pytest.approx((0.75, 0.625))
    assert (first + second) / 2 == pytest.approx(0.6875)


def test_plan_step_counts_no_sample_without_reward_or_token():
    samples = samples_of([[3, 3], [3] * 3, [], [4]], weights=[1, 0, 1, 1], advantages=[1, 1, 1, 0])
    step = plan_step(samples, range(4), UpdateConfig())
    assert step.scale == {0: 1 / 3, 3: 1 / 3}
    assert step.units == [(0,)]


@pytest.mark.parametrize(
    "values", [{"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"loss": "my.module:loss"}]
)
def test_plan_step_trains_on_what_has_no_advantage_where_something_else_pulls(values):
    samples = samples_of([[3], [4]], advantages=[1, 0])
    assert plan_step(samples, range(2), UpdateConfig(**values)).units == [(0,), (1,)]


def test_plan_step_of_nothing_known_has_nothing_to_do():
    samples = samples_of([[3], [4]], weights=[0, 0])
    for loss in ("clip", "dpo"):
        step = plan_step(samples, range(2), UpdateConfig(loss=loss))
        assert (step.units, step.num_samples) == ([], 0)


def test_pair_weights_give_every_pair_the_same_say():
    weights = pair_weights({0: 2, 1: 8, 2: 1, 3: 1}, [(0, 1), (3, 2)])
    assert weights == {0: 1 / 20, 1: 1 / 20, 2: 1 / 4, 3: 1 / 4}


def test_microbatches_keep_pairs_together_and_in_order():
    samples = samples_of([[3] * n for n in (1, 9, 4, 4, 2, 7)])
    units = [(1, 0), (2, 3), (5, 4)]
    found = []
    for rank in range(2):
        for members in microbatches_of(samples, units, 20, rank, 2):
            found += [tuple(members[k : k + 2]) for k in range(0, len(members), 2)]
    assert sorted(found) == sorted(units)


def test_split_minibatches_keeps_groups_whole():
    groups = ["a", "b", "a", "c", "b", "d"]
    assert split_minibatches(groups, 2) == [[0, 2, 1, 4], [3, 5]]
    assert np.array(split_minibatches(groups, 1)).tolist() == [[0, 2, 1, 4, 3, 5]]
