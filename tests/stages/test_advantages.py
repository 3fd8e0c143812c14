"""Advantages against worked numbers: one group's spread must never leak into another's."""

import numpy as np
import pytest

from stages.update.advantages import grpo, sample_weights

NAN = float("nan")


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0]),
        ([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        ([0.7], [0]),
        ([1, NAN, 0, 1], [0.577350, 0, -1.154701, 0.577350]),
        ([1, NAN, NAN, NAN], [0, 0, 0, 0]),
        ([NAN, NAN], [0, 0]),
        ([0.1 + 0.2, 0.3, 0.3], None),
    ],
)
def test_grpo_of_one_group_gives_the_worked_numbers(rewards, expected):
    got = grpo(["g"] * len(rewards), np.array(rewards, dtype=float))
    assert np.isfinite(got).all()
    if expected is not None:
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_grpo_of_a_group_cut_short_keeps_to_its_own_members():
    groups = ["a", "a", "a", "b", "b", "b", "b"]
    rewards = np.array([1, 0, 0, 1, 1, 1, 0], dtype=float)
    expected = [1.154701, -0.577350, -0.577350, 0.5, 0.5, 0.5, -1.5]
    np.testing.assert_allclose(grpo(groups, rewards), expected, atol=1e-6)
    order = np.random.RandomState(3).permutation(7)
    shuffled = grpo([groups[i] for i in order], rewards[order])
    np.testing.assert_allclose(shuffled, np.array(expected)[order], atol=1e-6)


def test_sample_weights_of_a_null_reward_leave_out_sample_or_group():
    groups = ["a", "a", "b", "b"]
    rewards = np.array([1.0, NAN, 0.0, 1.0])
    assert sample_weights(groups, rewards, "drop_sample").tolist() == [1, 0, 1, 1]
    assert sample_weights(groups, rewards, "drop_group").tolist() == [0, 0, 1, 1]
