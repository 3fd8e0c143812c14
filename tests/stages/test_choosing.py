"""Which groups make up a batch: by the spread of their rewards, the first ones, and no others."""

from dataclasses import replace

import numpy as np
import pytest

from artifacts.manifests import Ref
from artifacts.rounds import in_round, inputs_to_rounds, rounds_to_inputs
from stages.groups import count_with_spread, groups_with_spread
from stages.rollout.selection import num_to_draw
from stages.update.advantages import Scored, compute_advantages
from stages.update.batch import Component
from stages.update.config import UpdateConfig
from stages.update.samples import split_minibatches

NAN = float("nan")
# Group by group: no spread; some; a null that leaves some; a null that leaves none; some; some.
GROUPS = {
    "a": [1.0, 1.0, 1.0],
    "b": [0.0, 1.0, 0.0],
    "c": [NAN, 1.0, 0.5],
    "d": [NAN, 1.0, 1.0],
    "e": [0.1 + 0.2, 0.3, 0.3],  # by rounding alone
    "f": [2.0, 0.0, 1.0],
    "g": [5.0, 4.0, 0.0],
    "h": [NAN, NAN, NAN],
}


def scored(names):
    """Samples of these groups: ragged tokens, some of the environment, a component of its own."""
    rng = np.random.default_rng(0)
    masks = {n: [rng.integers(0, 2, size=3 + k) | (np.arange(3 + k) == 0) for k in range(3)]
             for n in GROUPS}  # fmt: skip
    rewards_S = np.array([r for name in names for r in GROUPS[name]])
    flat = [mask.astype(np.int8) for name in names for mask in masks[name]]
    return Scored(
        groups=[name for name in names for _ in range(3)],
        rewards_S=rewards_S,
        components=[Component("exact", 1.0, rewards_S)],
        token_rewards=None,
        masks=flat,
        sampler_logprobs=[np.zeros(len(mask), np.float32) for mask in flat],
        reference_logprobs=None,
        was_truncated_S=np.zeros(len(flat), dtype=bool),
        max_new_tokens=5,
    )


def test_groups_with_spread_under_each_policy_for_nulls_are_those_counted_by_hand():
    samples = scored(GROUPS)
    found = groups_with_spread(samples.groups, samples.rewards_S)
    assert [samples.groups[members[0]] for members in found] == ["b", "c", "f", "g"]
    counts = count_with_spread(samples.groups, samples.rewards_S)
    assert counts == {"drop_sample": 4, "drop_group": 3, "fail": 4}


@pytest.mark.parametrize("overlong", [0, 2])
@pytest.mark.parametrize(
    "advantage", ["grpo", "rloo", "opo", "gdpo", "reinforce_pp", "reinforce_pp_baseline"]
)
@pytest.mark.parametrize(("wanted", "chosen"), [(1, "b"), (3, "bcf"), (4, "bcfg"), (9, "bcfg")])
def test_chosen_groups_get_what_they_would_get_had_no_others_been_drawn(
    advantage, overlong, wanted, chosen
):
    config = UpdateConfig(
        advantage=advantage, overlong_buffer_tokens=overlong, zero_spread="drop", kl_coef=0.0
    )
    every, alone = scored(GROUPS), scored(list(chosen))
    made = compute_advantages(every, config, "drop_sample", wanted)
    expected = compute_advantages(alone, config, "drop_sample")
    is_chosen = np.isin(every.groups, list(chosen))
    assert made.chosen_S.tolist() == is_chosen.tolist()
    assert made.weights_S[is_chosen].tolist() == expected.weights_S.tolist()
    assert not made.weights_S[~is_chosen].any()
    for row, other in zip(np.flatnonzero(is_chosen), expected.advantages, strict=True):
        np.testing.assert_array_equal(made.advantages[row], other)
    assert not any(made.advantages[row].any() for row in np.flatnonzero(~is_chosen))
    assert made.metrics["update/surplus_groups"] == max(0, 4 - wanted)
    assert made.metrics["update/short_groups"] == max(0, wanted - 4)
    assert made.metrics["update/drawn_groups"] == 8
    assert made.metrics["update/zero_spread_groups"] == 3


def test_batch_of_no_group_with_spread_teaches_nothing():
    config = UpdateConfig(advantage="reinforce_pp", zero_spread="drop")
    made = compute_advantages(scored("adh"), config, "drop_sample", 2)
    assert not made.weights_S.any()
    assert not any(row.any() for row in made.advantages)
    assert made.metrics["update/short_groups"] == 2
    assert made.metrics["update/advantage_mean"] is None


def test_kl_in_the_reward_is_measured_over_all_that_was_sampled():
    samples = scored(GROUPS)
    sampler = [np.full(len(m), 0.5, np.float32) for m in samples.masks]
    reference = [np.zeros(len(mask), np.float32) for mask in samples.masks]
    samples = replace(samples, sampler_logprobs=sampler, reference_logprobs=reference)
    config = UpdateConfig(zero_spread="drop", reward_kl_coef=0.1)
    some, every = (compute_advantages(samples, config, "drop_sample", n) for n in (1, None))
    assert some.reward_kl == every.reward_kl > 0


def test_steps_share_out_chosen_groups_and_leave_steps_empty_where_there_are_too_few():
    groups = ["a", "b", "a", "b", "c", "d", "d", "c"]
    chosen_S = np.isin(groups, ["b", "c", "d"])
    assert split_minibatches(groups, 1, chosen_S) == [[1, 3, 4, 7, 5, 6]]
    assert split_minibatches(groups, 3, chosen_S) == [[1, 3], [4, 7], [5, 6]]
    assert split_minibatches(groups, 2, np.isin(groups, ["c"])) == [[], [4, 7]]


@pytest.mark.parametrize(
    ("wanted", "found", "max_rounds", "oversample", "expected"),
    [
        (8, [], 1, 1.0, 8),
        (8, [], 1, 1.25, 10),
        (8, [3], 1, 1.25, 0),  # no round is left
        (8, [3], 2, 1.0, 5),
        (8, [3, 5], 9, 2.0, 0),
        (8, [9], 9, 2.0, 0),
        (8, [0, 0], 3, 1.5, 12),
        (8, [7], 2, 1.5, 2),
        (10, [], 1, 1.1, 11),  # and not the 12 of 10 * 1.1 in binary
        (30, [], 1, 1.15, 35),
    ],
)
def test_next_round_draws_what_is_missing_times_the_factor_rounded_up(
    wanted, found, max_rounds, oversample, expected
):
    assert num_to_draw(wanted, found, max_rounds, oversample) == expected


def test_inputs_of_rounds_are_found_again_in_order():
    refs = [(Ref(f"r{n}", "0"), Ref(f"s{n}", "0")) for n in range(12)]
    inputs = {**rounds_to_inputs(refs), "policy": Ref("model", "0")}
    assert list(inputs)[:4] == ["rollout", "scores", "rollout.2", "scores.2"]
    assert inputs_to_rounds(inputs) == refs
    assert [in_round(3, number) for number in (1, 2, 10)] == ["3", "3.2", "3.10"]
