"""The weights of a step's tokens: one sum over all, whatever the split."""

import numpy as np
import pytest

from stages.update.samples import Samples, split_minibatches
from stages.update.trainer import loss_scale


def samples_of(lengths, weights=None):
    count = len(lengths)
    return Samples(
        ids=[str(i) for i in range(count)],
        groups=[str(i) for i in range(count)],
        sequences=[([1], [3] * n) for n in lengths],
        loss_masks=[np.ones(n, np.int8) for n in lengths],
        sampler_logprobs=[np.zeros(n, np.float32) for n in lengths],
        reference_logprobs=None,
        weights_S=np.ones(count) if weights is None else np.array(weights, dtype=float),
        advantages=[np.ones(n) for n in lengths],
    )


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token_mean", 0.6875), ("sequence_mean", 0.9375)]
)
def test_loss_scale_over_unequal_lengths_gives_the_worked_mean(aggregation, expected):
    samples = samples_of([2, 8, 4, 2])
    scale = loss_scale(samples, range(4), aggregation)
    losses = [1, 0.5, 0.25, 2]
    total = sum(scale[i] * loss * len(samples.loss_masks[i]) for i, loss in enumerate(losses))
    assert total == pytest.approx(expected)


def test_loss_scale_leaves_out_samples_without_reward_and_without_tokens():
    scale = loss_scale(samples_of([2, 3, 0], weights=[1, 0, 1]), range(3), "token_mean")
    assert scale == {0: 0.5}


def test_split_minibatches_keeps_groups_whole():
    groups = ["a", "b", "a", "c", "b", "d"]
    assert split_minibatches(groups, 2) == [[0, 2, 1, 4], [3, 5]]
