"""Every estimator against numbers worked out by hand, and against plain loops from its paper."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plain_estimators as plain
from stages.contract import StageError
from stages.update.batch import Batch, Component, discounted_sums, whitened
from stages.update.estimators import ESTIMATORS

NAN = float("nan")
GROUPED = sorted(name for name, e in ESTIMATORS.items() if e.compares_group)


def batch_of(rewards, groups=None, lengths=None, parts=(), **options):
    """A batch with a reward a sample, on its last token."""
    lengths = lengths or [1] * len(rewards)
    rewards_S = np.array(rewards, dtype=float)
    tokens = [np.zeros(n) for n in lengths]
    for row, reward in zip(tokens, rewards_S, strict=True):
        row[-1:] = np.nan_to_num(reward)
    return Batch(
        groups=groups or ["g"] * len(rewards),
        rewards_S=rewards_S,
        components=[Component(str(k), w, np.array(v, float)) for k, (w, v) in enumerate(parts)],
        token_rewards=tokens,
        masks=[np.ones(n, np.int8) for n in lengths],
        values=options.get("values"),
        sampler_logprobs=[np.zeros(n) for n in lengths],
        reference_logprobs=None,
        was_truncated_S=np.zeros(len(rewards), bool),
        gamma=options.get("gamma", 1.0),
        gae_lambda=options.get("gae_lambda", 1.0),
    )


def advantages(name, batch):
    return [row.tolist() for row in ESTIMATORS[name].estimate(batch).advantages]


def firsts(name, batch):
    """The advantage of each sample's first token."""
    return [row[0] for row in advantages(name, batch)]


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("grpo", [1, 1, 1, 1], [0, 0, 0, 0]),
        ("grpo", [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        ("grpo", [0.7], [0]),
        ("grpo", [1, NAN, 0, 1], [0.577350, 0, -1.154701, 0.577350]),
        ("grpo", [1, NAN, NAN, NAN], [0, 0, 0, 0]),
        ("grpo", [NAN, NAN], [0, 0]),
        ("dr_grpo", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("dr_grpo", [1, NAN, 0, 1], [0.333333, 0, -0.666667, 0.333333]),
        # 1 - (0 + 0 + 0) / 3, and 0 - (1 + 0 + 0) / 3.
        ("rloo", [1, 0, 0, 0], [1, -0.333333, -0.333333, -0.333333]),
        ("rloo", [1, NAN, 0, 1], [0.5, 0, -1, 0.5]),
        # The mean of the two scores of successes less the mean of all four: 1/2 - 1/4, -1/4.
        ("maxrl", [1, 1, 0, 0], [1, 1, -1, -1]),
        ("maxrl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("reinforce", [1, NAN, 0.5, -2], [1, 0, 0.5, -2]),
    ],
)
def test_estimator_of_one_group_gives_the_worked_numbers(name, rewards, expected):
    np.testing.assert_allclose(firsts(name, batch_of(rewards)), expected, atol=1e-6)


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(
    "rewards", [[1.0] * 4, [0.1] * 3, [0.1 + 0.2, 0.3, 0.3], [0.7], [0.3, NAN, NAN], [NAN, NAN]]
)
def test_group_without_spread_gets_exactly_0_from_every_group_estimator(name, rewards):
    batch = batch_of(rewards, lengths=[3] * len(rewards), parts=[(1.0, rewards)])
    assert advantages(name, batch) == [[0.0] * 3] * len(rewards)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.154701, -0.577350, -0.577350, 0.5, 0.5, 0.5, -1.5]),
        ("dr_grpo", [0.666667, -0.333333, -0.333333, 0.25, 0.25, 0.25, -0.75]),
    ],
)
def test_group_cut_short_keeps_to_its_own_members(name, expected):
    batch = batch_of([1, 0, 0, 1, 1, 1, 0], groups=["a"] * 3 + ["b"] * 4)
    np.testing.assert_allclose(firsts(name, batch), expected, atol=1e-6)


def test_prompt_that_stands_twice_is_compared_by_item():
    batch = batch_of([1, 1, 0, 0], groups=["first", "first", "second", "second"])
    assert firsts("grpo", batch) == [0, 0, 0, 0]


def test_opo_weighs_the_baseline_by_length():
    # (3 x 1 + 1 x 0) / 4 = 0.75.
    batch = batch_of([1, 0], lengths=[3, 1])
    assert advantages("opo", batch) == [[0.25] * 3, [-0.75]]


def test_gdpo_tells_apart_what_the_sum_of_rewards_does_not():
    # Sums 0 and 2 in one group, 0 and 1 in the other: grpo gives both ±0.707107.
    parts = [(1.0, [0, 1, 0, 1]), (1.0, [0, 1, 0, 0])]
    batch = batch_of([0, 2, 0, 1], groups=["a", "a", "b", "b"], parts=parts)
    # Each component ±1/sqrt(2) where it has spread: sums ±sqrt(2), ±sqrt(1/2); deviation
    # sqrt((2 + 2 + 0.5 + 0.5) / 4) = sqrt(1.25).
    expected = [-1.264911, 1.264911, -0.632456, 0.632456]
    np.testing.assert_allclose(firsts("gdpo", batch), expected, atol=1e-6)
    weighted = replace(batch, components=[replace(batch.components[0], weight=3.0)])
    np.testing.assert_allclose(firsts("gdpo", weighted), [-1, 1, -1, 1], atol=1e-12)


def test_reinforce_discounts_over_the_tokens_that_follow():
    batch = batch_of([8.0], lengths=[4], gamma=0.5)
    assert advantages("reinforce", batch) == [[1, 2, 4, 8]]


def test_reinforce_skips_over_what_the_environment_wrote():
    batch = replace(
        batch_of([4.0], lengths=[6], gamma=0.5),
        masks=[np.array([1, 1, 0, 0, 0, 1], np.int8)],
    )
    assert advantages("reinforce", batch) == [[1, 2, 0, 0, 0, 4]]


def test_gae_of_two_turns_gives_the_worked_numbers():
    # Sampled tokens 0, 1, 4; values 1, 2, 3 there; reward 5 on the last; gamma 1/2, lambda 1/2.
    # delta: 0 + 1 - 1 = 0; 0 + 1.5 - 2 = -0.5; 5 + 0 - 3 = 2.
    # A: 2; -0.5 + 2 / 4 = 0; 0 + 0 = 0. Mean 2/3, deviation sqrt(8)/3.
    batch = replace(
        batch_of([5.0], lengths=[5], gamma=0.5, gae_lambda=0.5),
        masks=[np.array([1, 1, 0, 0, 1], np.int8)],
        values=[np.array([1.0, 2.0, 70.0, 80.0, 3.0])],
    )
    estimate = ESTIMATORS["gae"].estimate(batch)
    assert estimate.returns[0].tolist() == [1, 2, 0, 0, 5]
    expected = [-0.707107, -0.707107, 0, 0, 1.414214]
    np.testing.assert_allclose(estimate.advantages[0], expected, atol=1e-6)


def test_gae_with_lambda_1_learns_the_return():
    values = [np.array([0.25, -3.0, 7.5])]
    batch = batch_of([2.0], lengths=[3], values=values)
    np.testing.assert_allclose(ESTIMATORS["gae"].estimate(batch).returns[0], [2, 2, 2], atol=1e-12)


WHITENED = [
    *(-1.218493, -1.037975, -0.857458, -0.676941),
    *(0.406164, 0.767199, 1.128234, 1.489269),
]


@pytest.mark.parametrize("split", [[8], [4, 4], [1, 7], [3, 2, 3]])
def test_whitening_is_over_the_whole_batch_however_it_is_split(split):
    tokens = np.array([1, 2, 3, 4, 10, 12, 14, 16], float)
    assert (tokens.mean(), round(tokens.std(), 6)) == (7.75, 5.539630)
    np.testing.assert_allclose(whitened(tokens), WHITENED, atol=1e-6)
    # As token rewards whose returns are those numbers, sample by sample.
    parts = np.split(tokens, np.cumsum(split)[:-1])
    batch = replace(
        batch_of([0.0] * len(parts), lengths=split),
        token_rewards=[part - np.append(part[1:], 0) for part in parts],
    )
    np.testing.assert_allclose(np.concatenate(advantages("reinforce_pp", batch)), WHITENED, 1e-5)


def test_null_samples_stand_outside_the_batch_that_is_whitened():
    whole = advantages("reinforce_pp", batch_of([1, 3, NAN], lengths=[2, 2, 50]))
    assert whole == [[-1, -1], [1, 1], [0] * 50]


def test_numbers_too_small_to_square_have_no_spread():
    assert whitened(np.array([0.0, 1e-200])).tolist() == [0, 0]
    assert firsts("grpo", batch_of([0.0, 1e-200])) == [0, 0]


def test_maxrl_refuses_rewards_below_0():
    with pytest.raises(StageError, match="there is a reward of -1"):
        ESTIMATORS["maxrl"].estimate(batch_of([1, -1]))


@given(st.lists(st.floats(-3, 3), max_size=40), st.floats(0, 1))
def test_discounted_sums_are_those_of_a_plain_recursion(terms, factor):
    expected, following = [], 0.0
    for term in reversed(terms):
        following = term + factor * following
        expected.insert(0, following)
    np.testing.assert_allclose(discounted_sums(np.array(terms), factor), expected, atol=1e-11)


REWARDS = st.sampled_from([None, 0.0, 0.25, 1.0, 1.0, 2.0])


@st.composite
def samples(draw):
    """Samples of interleaved groups with two components, some null, of any mask."""
    made = []
    for _ in range(draw(st.integers(1, 12))):
        length = draw(st.integers(0, 6))
        tokens = st.lists(st.floats(-2, 2), min_size=length, max_size=length)
        mask = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        parts = [(1.0, draw(REWARDS)), (0.5, draw(REWARDS))]
        is_null = any(value is None for _, value in parts)
        total = None if is_null else sum(weight * value for weight, value in parts)
        rewards = [0.0 if is_null else x * m for x, m in zip(draw(tokens), mask, strict=True)]
        group = draw(st.sampled_from("abc"))
        made.append(plain.Sample(group, total, parts, rewards, mask, draw(tokens)))
    return made


def batch_from(made, gamma=1.0, gae_lambda=1.0):
    def floats(values):
        return np.array([NAN if v is None else v for v in values], float)

    masks = [np.array(s.mask, np.int8) for s in made]
    return Batch(
        groups=[s.group for s in made],
        rewards_S=floats(s.reward for s in made),
        components=[
            Component(str(k), made[0].parts[k][0], floats(s.parts[k][1] for s in made))
            for k in range(2)
        ],
        token_rewards=[np.array(s.rewards, float) for s in made],
        masks=masks,
        values=[np.array(s.values, float) for s in made],
        sampler_logprobs=[np.zeros(len(m)) for m in masks],
        reference_logprobs=None,
        was_truncated_S=np.zeros(len(made), bool),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )


def close(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9)


def test_every_estimator_has_an_oracle():
    assert plain.ORACLES.keys() == ESTIMATORS.keys()


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@settings(max_examples=60, deadline=None)
@given(made=samples(), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.95, 0.0]))
def test_estimator_agrees_with_a_plain_loop_of_its_paper(name, made, gamma, lam):
    got = ESTIMATORS[name].estimate(batch_from(made, gamma, lam))
    expected = plain.ORACLES[name](made, gamma, lam)
    close(got.advantages, expected)
    if name == "gae":
        targets = plain.gae_unwhitened(made, gamma, lam)
        for row, target, sample in zip(got.returns, targets, made, strict=True):
            wanted = [
                (a + v) * m for a, v, m in zip(target, sample.values, sample.mask, strict=True)
            ]
            np.testing.assert_allclose(row, wanted, atol=1e-9)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@settings(max_examples=25, deadline=None)
@given(made=samples(), data=st.data())
def test_estimator_is_blind_to_the_order_of_samples_and_the_names_of_groups(name, made, data):
    order = data.draw(st.permutations(range(len(made))))
    got = advantages(name, batch_from(made, 0.9, 0.9))
    renamed = [replace(made[i], group=f"row {'cab'.index(made[i].group)}") for i in order]
    close(advantages(name, batch_from(renamed, 0.9, 0.9)), [got[i] for i in order])


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@settings(max_examples=25, deadline=None)
@given(made=samples(), reward=st.sampled_from([0.0, 5.0]))
def test_null_sample_changes_nobody_elses_advantage(name, made, reward):
    null = plain.Sample("a", None, [(1.0, reward), (0.5, None)], [0.0] * 3, [1, 1, 1], [1.0] * 3)
    with_null = advantages(name, batch_from([*made, null], 0.9, 0.9))
    close(with_null[:-1], advantages(name, batch_from(made, 0.9, 0.9)))
    if name != "gae":
        assert with_null[-1] == [0, 0, 0]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@settings(max_examples=25, deadline=None)
@given(made=samples())
def test_estimator_gives_finite_numbers_and_0_where_nothing_was_sampled(name, made):
    for row, sample in zip(advantages(name, batch_from(made)), made, strict=True):
        assert all(
            math.isfinite(x) and (m or x == 0) for x, m in zip(row, sample.mask, strict=True)
        )
