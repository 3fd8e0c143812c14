"""Reward functions: how they are found, called and checked, one or many at a time."""

import json
from pathlib import Path

import numpy as np
import pytest

from scoring import reward_file
from stages.contract import StageError
from stages.score.calls import Pace, call_reward
from stages.score.components import combine
from stages.score.config import RewardSpec, ScoreConfig
from stages.score.outcomes import Outcome, failed, from_json, process_ended, timed_out, to_json
from stages.score.rewards import load_reward, reward_digests

SOURCE = """
import asyncio
import numpy as np


def plain(text, ground_truth, **row):
    return float(text == ground_truth)


def lean(text):
    return len(text)


def scaled(text, factor, offset=0.0, **row):
    return factor * len(text) + offset


def gives(text, value, **row):
    return eval(value, {"np": np})


def all_give(batch, value):
    return eval(value, {"np": np, "batch": batch})


def third_raises(text, **row):
    if row["sample_id"] == "s3":
        raise KeyError(f"/secret/folder/of/{text} at 0x7f00deadbeef")
    return float(row["sample_id"][1:])


async def backwards(text, **row):
    # The later a sample, the sooner it ends.
    await asyncio.sleep(0.02 * (6 - int(row["sample_id"][1:])))
    return float(row["sample_id"][1:])


def each_token(text, tokens, **row):
    return [float(token == "b") for token in tokens]
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return reward_file(tmp_path_factory.mktemp("rewards"), SOURCE)


def rows(count: int = 6) -> list[dict]:
    return [
        {"text": "abc", "ground_truth": "abc", "num_tokens": 3, "sample_id": f"s{n}"}
        | {"tokens": ["a", "b", "c"]}
        for n in range(count)
    ]


def call(source: str, name: str, count: int = 6, **fields) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    reward = load_reward(RewardSpec(fn=f"{source}:{name}", **fields))

    def report(index, outcome):
        if outcome is not None:
            assert index not in outcomes
            outcomes[index] = outcome

    call_reward(reward, rows(count), report, Pace(None))
    return [outcomes[index] for index in range(count)]


def test_reward_per_sample_gets_the_row_by_name_and_only_what_it_names(source) -> None:
    assert [o.value for o in call(source, "plain", 2)] == [1.0, 1.0]
    assert [o.value for o in call(source, "lean", 2)] == [3.0, 3.0]


def test_reward_options_are_passed_as_keywords(source) -> None:
    options = {"factor": 2.0, "offset": 0.5}
    assert [o.value for o in call(source, "scaled", 1, options=options)] == [6.5]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("None", None), ("True", 1.0), ("False", 0.0), ("3", 3.0), ("np.float32(0.5)", 0.5)],
)
def test_reward_value_that_is_a_number_or_none_is_taken(source, value, expected) -> None:
    (outcome,) = call(source, "gives", 1, options={"value": value})
    assert outcome == Outcome(expected)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("'1.0'", "TypeError", "a reward is a number or None, and this is '1.0'"),
        ("[1.0]", "TypeError", "a reward is a number or None, and this is [1.0]"),
        ("{}", "TypeError", "a reward is a number or None, and this is {}"),
        ("1j", "TypeError", "a reward is a number or None, and this is 1j"),
        ("np.ones(1)", "TypeError", "a reward is a number or None, and this is array([1.])"),
        ("float('nan')", "ValueError", "a reward is finite, and this is nan"),
        ("float('inf')", "ValueError", "a reward is finite, and this is inf"),
        ("-float('inf')", "ValueError", "a reward is finite, and this is -inf"),
        ("np.float64('nan')", "ValueError", "a reward is finite, and this is nan"),
    ],
)
def test_reward_value_that_is_no_finite_number_is_an_error_of_its_sample(
    source, value, kind, message
) -> None:
    (outcome,) = call(source, "gives", 1, options={"value": value})
    assert outcome.value is None
    assert (outcome.failure.type, outcome.failure.message) == (kind, message)
    # In a batch too, and of the others none is touched.
    listed = f"[1.0, {value}, 3.0]"
    first, second, third = call(source, "all_give", 3, batched=True, options={"value": listed})
    assert (first, third) == (Outcome(1.0), Outcome(3.0))
    assert second.failure.message == message


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[1.0]", "expected 6 for 6 samples, got 1"),
        ("[1.0] * 5", "expected 6 for 6 samples, got 5"),
        ("[1.0] * 7", "expected 6 for 6 samples, got 7"),
        ("[]", "expected 6 for 6 samples, got 0"),
        ("None", "expected a list of 6 for 6 samples, got None"),
        ("1.0", "expected a list of 6 for 6 samples, got a float"),
        ("np.ones((6, 1))", "got a ndarray of shape (6, 1)"),
        ("(float(n) for n in range(6))", "got a generator"),
        ("{n: 1.0 for n in range(6)}", "got a dict"),
        ("'123456'", "got a str"),
    ],
)
def test_reward_of_a_batch_that_gives_no_list_of_its_length_stops_scoring(
    source, value, said
) -> None:
    with pytest.raises(StageError) as caught:
        call(source, "all_give", batched=True, options={"value": value})
    assert said in str(caught.value)
    assert "'all_give'" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        "[True, False, True, False, True, False]",
        "(1.0, 0.0, 1.0, 0.0, 1.0, 0.0)",
        "np.array([1, 0, 1, 0, 1, 0])",
        "[float(int(r['sample_id'][1:]) % 2 == 0) for r in batch]",
    ],
)
def test_reward_of_a_batch_gives_each_sample_its_own(source, value) -> None:
    outcomes = call(source, "all_give", batched=True, options={"value": value})
    assert [o.value for o in outcomes] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]


def test_reward_that_raises_on_one_sample_leaves_the_others_theirs(source) -> None:
    outcomes = call(source, "third_raises")
    assert [o.value for o in outcomes] == [0.0, 1.0, 2.0, None, 4.0, 5.0]
    failure = outcomes[3].failure
    assert failure.type == "KeyError"
    # What is digested names no folder and no address of this host.
    assert failure.message == "'…/abc at 0x…'"
    assert failure.traceback == ("rewards.py:28 in third_raises",)


def test_reward_calls_that_end_out_of_order_keep_their_samples(source) -> None:
    outcomes = call(source, "backwards", concurrency=6)
    assert [o.value for o in outcomes] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_reward_per_token_counts_as_the_sum_of_its_tokens(source) -> None:
    (outcome,) = call(source, "each_token", 1, per_token=True)
    assert outcome == Outcome(1.0, (0.0, 1.0, 0.0))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[1.0, 2.0]", "expected 3 for 3 response tokens, got 2"),
        ("2.0", "expected a list of 3 for 3 response tokens, got a float"),
        ("[1.0, None, 2.0]", "token 1 has None"),
        ("[1.0, float('nan'), 2.0]", "a reward is finite"),
    ],
)
def test_reward_per_token_of_another_length_or_kind_is_an_error(source, value, said) -> None:
    (outcome,) = call(source, "gives", 1, per_token=True, options={"value": value})
    assert outcome.value is None
    assert said in outcome.failure.message


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("plain", {"batched": True}, "is not called with a batch alone"),
        ("all_give", {"options": {"value": "1"}}, "set batched: true"),
        ("scaled", {"options": {"facter": 1}}, "has no option 'facter'; it has factor, offset"),
        ("plain", {"options": {"text": "x"}}, "has no option 'text'; it has none"),
        ("plain", {"concurrency": 4}, "is not async"),
        ("plain", {"calls_per_second": 1.0}, "is not async"),
        ("absent", {}, "has no function 'absent'"),
    ],
)
def test_reward_that_cannot_be_called_as_configured_is_refused(source, name, fields, said) -> None:
    with pytest.raises(ValueError, match="reward") as caught:
        load_reward(RewardSpec(fn=f"{source}:{name}", **fields))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"fn": "exact_mach"}, "did you mean 'exact_match'?"),
        ({"fn": "nothing"}, "one of code_tests, exact_match"),
        ({"fn": "a:b", "options": {"x": {1, 2}}}, "no stable bytes"),
        ({"fn": "a:b", "name": "a b"}, "a reward's name is 'a b'"),
        ({"fn": "a:b", "timeout_seconds": 0}, "greater than 0"),
        ({"fn": "a:b", "weight": float("nan")}, "finite"),
    ],
)
def test_reward_config_refuses(values, said) -> None:
    with pytest.raises(ValueError, match=r"(?i)reward") as caught:
        RewardSpec(**values)
    assert said in str(caught.value)


@pytest.mark.parametrize("names", [("a", "a"), ("a", "a_mean"), ("mean", "b"), ("b_std", "b")])
def test_score_config_with_two_rewards_of_one_metric_is_refused(names) -> None:
    with pytest.raises(ValueError, match="give one a name of its own"):
        ScoreConfig(rewards=[{"fn": "m:f", "name": name} for name in names])


def test_reward_digest_follows_the_source_and_not_the_place(source, tmp_path: Path) -> None:
    spec = RewardSpec(fn=f"{source}:plain")
    moved = spec.model_copy(update={"fn": reward_file(tmp_path, SOURCE) + ":plain"})
    edited = reward_file(tmp_path, SOURCE + "\n", "edited.py") + ":plain"
    assert reward_digests([spec]) == reward_digests([moved])
    assert reward_digests([spec]) != reward_digests([spec.model_copy(update={"fn": edited})])


def specs(**weights: float) -> list[RewardSpec]:
    return [
        RewardSpec(fn=f"m:{name}", weight=w, per_token=name == "t") for name, w in weights.items()
    ]


def test_components_are_summed_by_weight_and_tokens_apart() -> None:
    outcomes = [Outcome(1.0), Outcome(3.0, (1.0, 2.0)), Outcome(0.5)]
    made = combine(specs(a=2.0, t=0.5, b=-1.0), outcomes, "s", 0)
    assert made.components == {"a": 1.0, "t": 3.0, "b": 0.5}
    assert made.reward == 2.0 - 0.5
    assert made.token_rewards == [0.5, 1.0]
    assert made.error is None
    # Each component once: the sum of both columns is the weighted sum of the components.
    assert made.reward + sum(made.token_rewards) == 2.0 * 1.0 + 0.5 * 3.0 - 1.0 * 0.5


def test_components_with_a_needed_null_have_no_sum_and_with_weight_zero_still_do() -> None:
    outcomes = [Outcome(1.0), Outcome()]
    assert combine(specs(a=1.0, b=1.0), outcomes, "s", 0).reward is None
    assert combine(specs(a=1.0, b=0.0), outcomes, "s", 0).reward == 1.0
    tokens = [Outcome(), Outcome(3.0, (1.0, 2.0))]
    made = combine(specs(a=1.0, t=1.0), tokens, "s", 0)
    assert (made.reward, made.token_rewards) == (None, None)


def test_components_that_failed_leave_a_record_each() -> None:
    outcomes = [timed_out(1.5), Outcome(1.0), process_ended(-9)]
    records = json.loads(combine(specs(a=1.0, b=1.0, c=1.0), outcomes, "g-1", 7).error)
    assert [(r["function"], r["type"], r["message"]) for r in records] == [
        ("a", "TimeoutError", "timed out after 1.5 s"),
        ("c", "ProcessEnded", "its process was killed by signal 9 during the call"),
    ]
    assert {(r["sample_id"], r["shard"]) for r in records} == {("g-1", 7)}


def test_outcome_crosses_a_pipe_unchanged() -> None:
    for outcome in (
        Outcome(0.1),
        Outcome(),
        Outcome(0.3, (0.1, 0.2)),
        failed(ValueError("é")),
        timed_out(2),
    ):
        assert from_json(json.loads(json.dumps(to_json(outcome)))) == outcome
    assert float(np.float32(0.1)) == from_json(to_json(Outcome(float(np.float32(0.1))))).value
