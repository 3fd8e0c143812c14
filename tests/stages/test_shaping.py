"""Penalties, their places on tokens, the KL's controller, and who is left out of a step."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.contract import StageError
from stages.groups import kept_by_null_policy, zero_spread_groups
from stages.update.advantages import Scored, compute_advantages
from stages.update.batch import Component, Estimate
from stages.update.config import UpdateConfig
from stages.update.estimators import ESTIMATORS, Estimator
from stages.update.shaping import (
    at_sampled,
    keeps_kl_coef_positive,
    next_kl_coef,
    overlong_penalty,
)

NAN = float("nan")


def scored(rewards, groups=None, masks=None, **options):
    masks = masks or [[1]] * len(rewards)
    rewards_S = np.array(rewards, dtype=float)
    return Scored(
        groups=groups or ["g"] * len(rewards),
        rewards_S=rewards_S,
        components=[Component("exact", 1.0, rewards_S)],
        token_rewards=options.get("token_rewards"),
        masks=[np.array(mask, np.int8) for mask in masks],
        sampler_logprobs=options.get("sampler", [np.zeros(len(m), np.float32) for m in masks]),
        reference_logprobs=options.get("reference"),
        was_truncated_S=np.array(options.get("truncated", [False] * len(rewards))),
        max_new_tokens=options.get("limit", 10),
    )


def made(samples, on_null="drop_sample", **fields):
    return compute_advantages(samples, UpdateConfig(**fields), on_null)


def rows(result):
    return [row.tolist() for row in result.advantages]


def seen_by_estimator(monkeypatch, samples, **fields):
    """The batch that an estimator gets."""
    batches = []

    def keep(batch):
        batches.append(batch)
        return batch.per_sample(batch.rewards_S)

    monkeypatch.setitem(ESTIMATORS, "reinforce", Estimator(keep))
    compute_advantages(samples, UpdateConfig(advantage="reinforce", **fields), "drop_sample")
    return batches[0]


def test_overlong_penalty_falls_over_the_buffer_to_its_worked_values():
    lengths = np.array([0, 80, 81, 90, 99, 100, 120])
    expected = [0, 0, -0.05, -0.5, -0.95, -1, -1]
    np.testing.assert_allclose(overlong_penalty(lengths, 100, 20), expected, atol=1e-12)


def test_overlong_penalty_joins_the_reward_of_the_last_sampled_token(monkeypatch):
    masks = [[1] * 8, [1, 1, 1, 1, 1, 1, 1, 1, 1, 0], [1] * 10]
    fields = {"overlong_buffer_tokens": 4, "overlong_penalty": 2.0}
    batch = seen_by_estimator(monkeypatch, scored([1, 1, 1], masks=masks), **fields)
    # 8 tokens are 2 of 4 into the buffer: 1 - 2 x 0.5; 9 sampled ones 3 of 4; 10 all.
    assert batch.rewards_S.tolist() == [0, -0.5, -1]
    assert [row.sum() for row in batch.token_rewards] == [0, -0.5, -1]
    assert batch.token_rewards[1][8] == -0.5
    assert [c.values_S.tolist() for c in batch.components] == [[1, 1, 1], [-1, -1.5, -2]]


def test_overlong_buffer_of_null_is_a_fifth_of_the_limit(monkeypatch):
    samples = scored([1, 1], masks=[[1] * 8, [1] * 9], limit=10)
    batch = seen_by_estimator(monkeypatch, samples, overlong_buffer_tokens=None)
    assert batch.rewards_S.tolist() == [1, 0.5]


def test_at_sampled_moves_what_the_environment_gave_to_the_token_it_answers():
    mask = np.array([0, 1, 1, 0, 0, 1, 0])
    rewards = np.array([1.0, 2, 4, 8, 16, 32, 64])
    assert at_sampled(rewards, mask).tolist() == [0, 3, 28, 0, 0, 96, 0]
    assert at_sampled(rewards, np.zeros(7)).tolist() == [0] * 7


@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(0, 1)), min_size=1))
def test_at_sampled_loses_nothing_where_anything_was_sampled(pairs):
    rewards, mask = map(np.array, zip(*pairs, strict=True))
    moved = at_sampled(rewards, mask)
    assert not moved[mask == 0].any()
    assert mask.sum() == 0 or math.isclose(moved.sum(), rewards.sum(), abs_tol=1e-9)


def test_token_rewards_and_the_outcome_add_up_token_by_token():
    token_rewards = [np.array([0.5, 0.0, 0.25]), np.array([0.0, 0.0, 1.0])]
    samples = scored([2.0, NAN], masks=[[1, 0, 1], [1, 1, 1]], token_rewards=token_rewards)
    result = made(samples, advantage="reinforce")
    assert rows(result) == [[2.75, 0, 2.25], [0, 0, 0]]
    assert result.weights_S.tolist() == [1, 0]
    # A group estimator compares sums: 2.75 and 1.75 around 2.25.
    both = scored([2.0, 0.75], masks=[[1, 0, 1], [1, 1, 1]], token_rewards=token_rewards)
    assert rows(made(both, advantage="dr_grpo")) == [[0.5, 0, 0.5], [-0.5] * 3]


def test_kl_in_the_reward_is_k1_of_the_sampler_on_sampled_tokens():
    samples = scored(
        [1.0, NAN],
        masks=[[1, 0, 1], [1]],
        sampler=[np.array([-1.0, -7.0, -2.0], np.float32), np.array([-50.0], np.float32)],
        reference=[np.array([-2.0, -1.0, -2.5], np.float32), np.array([-1.0], np.float32)],
    )
    result = made(samples, reward_kl_coef=0.1, advantage="reinforce")
    # k1 is 1 and 0.5: -0.1 - 0.05 + 1 from the first token on, -0.05 + 1 from the last.
    np.testing.assert_allclose(result.advantages[0], [0.85, 0, 0.95], atol=1e-12)
    assert result.reward_kl == 1.5
    assert (result.metrics["update/reward_kl"], result.metrics["update/reward_kl_coef"]) == (
        1.5,
        0.1,
    )


def test_kl_in_the_reward_without_reference_logprobs_is_refused():
    with pytest.raises(StageError, match="no reference log-probs"):
        made(scored([1.0]), reward_kl_coef=0.1)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(6.0, 0.1), (6.6, 0.1025), (12.0, 0.105), (5.4, 0.0975), (0.0, 0.095), (None, 0.1)],
)
def test_next_kl_coef_follows_the_error_within_its_bounds(kl, expected):
    # 256 / 1024 = 1/4 of an error of 10 %, and of at most 20 %.
    assert next_kl_coef(0.1, kl, 6.0, 1024, 256) == pytest.approx(expected, abs=1e-15)


def test_horizon_that_could_take_the_coefficient_to_0_is_told_apart():
    assert keeps_kl_coef_positive(num_samples=499, horizon=100)
    assert not keeps_kl_coef_positive(num_samples=500, horizon=100)
    assert next_kl_coef(1.0, 0.0, 1.0, 100, 500) == 0


def test_null_policy_leaves_out_sample_or_group():
    groups = ["a", "b", "a", "b"]
    rewards = np.array([1.0, 0.0, NAN, 1.0])
    assert kept_by_null_policy(groups, rewards, "drop_sample").tolist() == [True, True, False, True]
    assert kept_by_null_policy(groups, rewards, "drop_group").tolist() == [
        False,
        True,
        False,
        True,
    ]


def test_dropped_group_moves_no_statistic_of_the_batch():
    samples = scored([5.0, NAN, 1.0, 3.0], groups=["a", "a", "b", "b"])
    dropped = made(samples, "drop_group", advantage="reinforce_pp")
    assert rows(dropped) == [[0], [0], [-1], [1]]
    assert dropped.weights_S.tolist() == [0, 0, 1, 1]
    assert dropped.metrics["update/null_samples"] == 2


def test_none_among_rewards_takes_no_part():
    result = made(scored([1, NAN, 0, 1]), advantage="dr_grpo")
    np.testing.assert_allclose(np.concatenate(result.advantages), [1 / 3, 0, -2 / 3, 1 / 3])
    assert result.weights_S.tolist() == [1, 0, 1, 1]
    assert result.metrics["update/advantage_min"] == pytest.approx(-2 / 3)


def test_truncated_sample_filtered_has_no_weight_and_still_counts_in_the_baseline():
    samples = scored([1, 0, 0, 0], truncated=[False, True, False, False])
    kept = made(samples)
    filtered = made(samples, overlong="filter")
    assert kept.weights_S.tolist() == [1, 1, 1, 1]
    assert filtered.weights_S.tolist() == [1, 0, 1, 1]
    assert rows(filtered) == [[1.5], [0], [-0.5], [-0.5]]
    assert filtered.metrics["update/overlong_share"] == 0.25


def test_zero_spread_groups_are_those_of_equal_known_rewards():
    groups = ["a", "b", "a", "b", "c", "d", "d"]
    rewards = np.array([1.0, 1.0, NAN, 0.0, NAN, 0.1 + 0.2, 0.3])
    found = zero_spread_groups(groups, rewards)
    assert [members.tolist() for members in found] == [[0, 2], [5, 6]]


def test_zero_spread_dropped_leaves_every_count():
    samples = scored([1, 1, 1, 0], groups=["a", "a", "b", "b"])
    kept, dropped = made(samples), made(samples, zero_spread="drop")
    assert kept.weights_S.tolist() == [1, 1, 1, 1]
    assert dropped.weights_S.tolist() == [0, 0, 1, 1]
    assert {r.metrics["update/zero_spread_groups"] for r in (kept, dropped)} == {1}


def test_zero_spread_is_judged_before_the_length_penalty():
    samples = scored([0, 0], masks=[[1] * 5, [1] * 10])
    fields = {"zero_spread": "drop", "overlong_buffer_tokens": 2}
    assert made(samples, **fields).weights_S.tolist() == [0, 0]


def test_batch_of_nulls_alone_has_no_statistics_and_no_advantage():
    for name in sorted(ESTIMATORS.keys() - {"gae"}):
        result = made(scored([NAN, NAN], masks=[[1, 1], []]), advantage=name)
        assert rows(result) == [[0, 0], []]
        assert result.metrics["update/advantage_mean"] is None


def test_responses_of_one_token_and_of_none_are_no_special_case():
    result = made(scored([1, 0, 0], masks=[[1], [], [1, 1, 1]]), advantage="dr_grpo")
    expected = [2 / 3, -1 / 3, -1 / 3, -1 / 3]
    np.testing.assert_allclose(np.concatenate(result.advantages), expected)


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        ([1.0], "a list: return batch.per_sample"),
        (Estimate([np.zeros(1)]), "advantages of 1 samples, and there are 2"),
        (Estimate([np.zeros(1), np.zeros(3)]), r"of sample 1 \(h\) that are not 2 finite"),
        (Estimate([np.array([NAN]), np.zeros(2)]), r"of sample 0 \(g\) that are not 1 finite"),
        (Estimate([np.zeros(1), np.zeros(2)], [np.zeros(1)]), "returns of 1 samples"),
    ],
)
def test_estimator_that_does_not_fit_its_batch_is_refused_by_name(monkeypatch, result, sentence):
    monkeypatch.setitem(ESTIMATORS, "reinforce", Estimator(lambda batch: result))
    samples = scored([1, 0], groups=["g", "h"], masks=[[1], [1, 1]])
    with pytest.raises(StageError, match=f"update.advantage reinforce returned.*{sentence}"):
        made(samples, advantage="reinforce")
