"""A judge over real HTTP: verdicts reach their samples, and what fails is an error, never a 0."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from artifacts.round_metrics import over_rounds
from artifacts.store import Store
from artifacts.verification import verify
from judge_server import JudgeServer, Reply, judging, verdict
from scoring import commit_rollout, make_scorers, reward_file, rows_of, score
from stages.contract import StageError
from stages.score import run as stage
from stages.score.config import ScoreConfig
from stages.score.judge import Judge
from stages.score.judge_spec import JudgeSpec
from stages.score.rewards import reward_digests
from stages.score.verdict import NoVerdictError, read_verdict

RUBRIC = "Asked: {prompt}\nExpected: {ground_truth}\nGrade from 0 to 10:\n{response}"
KEY = "sk-never-written-0123456789"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "run"))


def spec(url: str = "http://localhost:1/v1", **fields: Any) -> dict[str, Any]:
    given = {"pattern": r"Grade: (-?\w+)", "scale": [0, 10], "prompt": RUBRIC, "attempts": 3}
    return {"judge": url, "model": "arbiter", **given, **fields}


def config(judge: JudgeServer, *others: dict[str, Any], **fields: Any) -> ScoreConfig:
    return ScoreConfig(rewards=[spec(judge.url, **fields), *others], max_error_share=1.0)


def graded(
    store: Store, texts: list[str], wanted: ScoreConfig, truth: str | None = "42"
) -> tuple[list[dict[str, Any]], Any]:
    rollout = commit_rollout(store, texts, 4, [truth] * len(texts))
    made = score(store, wanted, rollout, make_scorers(wanted))
    assert verify(store).problems == []
    return rows_of(store, made), made.manifest.metrics


def test_verdicts_reach_their_samples_whatever_ends_first_within_the_limit(
    store: Store, tmp_path: Path
) -> None:
    texts = [str(n) for n in range(8)]
    path = reward_file(tmp_path, "def one(text, **row):\n    return 1.0\n")
    with judging(lambda text, _: verdict(f"Grade: {text}", seconds=0.1 / (1 + int(text)))) as judge:
        others = {"fn": f"{path}:one", "weight": 0.5}
        wanted = config(judge, others, weight=2.0, concurrency=3, temperature=0.5, max_tokens=9)
        rows, _ = graded(store, texts, wanted)
    assert [row["reward.judge"] for row in rows] == [n / 10 for n in range(8)]
    assert [row["reward"] for row in rows] == pytest.approx([2 * n / 10 + 0.5 for n in range(8)])
    assert judge.most == 3
    request = next(r for r in judge.requests if r["messages"][0]["content"].endswith("\n5"))
    content = "Asked: prompt 2\nExpected: 42\nGrade from 0 to 10:\n5"
    assert request == {
        "model": "arbiter",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.5,
        "max_tokens": 9,
    }
    assert set(judge.keys) == {None}


# What the endpoint does for a sample of that text; then how often it is asked, and the error.
TROUBLE: dict[str, tuple[Any, int, str | None]] = {
    "fine": (verdict("Grade: 9"), 1, None),
    "twice down": ([Reply("oops", 503), Reply(hangs_up=True), verdict("Grade: 9")], 3, None),
    "busy once": ([Reply("slow down", 429, {"Retry-After": "0"}), verdict("Grade: 9")], 2, None),
    "vague once": ([verdict("Hm."), verdict("Grade: 9")], 2, None),
    "down": (Reply("oops", 500), 3, "status 500: 'oops' (in the last of 3 attempts)"),
    "hangs up": (Reply(hangs_up=True), 3, "RemoteProtocolError: Server disconnected"),
    "slow": (verdict("Grade: 9", seconds=1.2), 3, "no answer within 0.3 s"),
    "not json": (Reply("<html>Grade: 9</html>"), 3, "the answer is no JSON object: '<html>"),
    "deep": (Reply("[" * 100_000), 3, "the answer is no JSON object"),
    "no message": (Reply('{"choices": []}'), 3, "the endpoint's answer holds no message: {\"ch"),
    "odd message": (Reply('{"choices": [7]}'), 3, "the endpoint's answer holds no message"),
    "empty": (Reply('{"choices": [{"message": {"content": null}}]}'), 3, "there is no verdict"),
    "vague": (verdict("Great work!"), 3, "which begins: 'Great work!'"),
    "too good": (verdict("Grade: 11"), 3, "the verdict '11', not one from 0 to 10"),
    "nan": (verdict("Grade: nan"), 3, "the verdict 'nan', not one from 0 to 10"),
    "cut": (verdict("Grade: 1", finish_reason="length"), 3, "was cut at its token limit"),
    "forbidden": (Reply("no such model", 404), 1, "status 404: 'no such model'"),
}


def test_trouble_is_asked_again_or_an_error_and_never_a_reward(store: Store) -> None:
    def answer(text: str, attempt: int) -> Reply:
        replies = TROUBLE[text][0]
        return replies[attempt - 1] if isinstance(replies, list) else replies

    with judging(answer) as judge:
        wanted = config(judge, concurrency=99, timeout_seconds=0.3)
        rows, _ = graded(store, list(TROUBLE), wanted)
        assert dict(judge.asked) == {text: asked for text, (_, asked, _) in TROUBLE.items()}
        for row, (text, (_, _, message)) in zip(rows, TROUBLE.items(), strict=True):
            if message is None:
                assert (row["reward"], row["error"]) == (0.9, None), text
                continue
            assert (row["reward.judge"], row["reward"]) == (None, None), text
            (record,) = json.loads(row["error"])
            assert message in record["message"], text
            assert record["function"] == "judge"
        # Tried again when the endpoint is well, those alone are asked for.
        judge.answer, before = lambda *_: verdict("Grade: 3"), len(judge.requests)
        rollout = commit_rollout(store, list(TROUBLE), 4, ["42"] * len(TROUBLE))
        again = score(store, wanted, rollout, make_scorers(wanted), stage.retry_errors)
    failing = [message is not None for _, _, message in TROUBLE.values()]
    assert [row["reward"] for row in rows_of(store, again)] == [0.3 if n else 0.9 for n in failing]
    assert len(judge.requests) - before == sum(failing)


def test_too_many_failures_stop_the_stage_with_the_judge_and_its_answers(store: Store) -> None:
    with judging(lambda *_: Reply("insufficient quota", 402)) as judge:
        wanted = ScoreConfig(rewards=[spec(judge.url, name="arbiter")])
        with pytest.raises(StageError, match=r"arbiter on 4; first: .*status 402: 'insufficient"):
            graded(store, ["a", "b", "c", "d"], wanted)


def test_sample_without_a_truth_that_the_rubric_asks_for_is_not_judged(store: Store) -> None:
    with judging(lambda *_: verdict("Grade: 9")) as judge:
        rows, metrics = graded(store, ["a", "b"], config(judge), truth=None)
    assert [(row["reward"], row["error"]) for row in rows] == [(None, None)] * 2
    assert judge.requests == []
    assert metrics["score/judge/input_tokens"] is None


def test_response_fills_no_place_of_the_rubric_but_its_own(store: Store) -> None:
    with judging(lambda *_: verdict("Grade: 9")) as judge:
        graded(store, ["{ground_truth}{prompt}{x}"], config(judge))
    assert judge.requests[0]["messages"][0]["content"].endswith(":\n{ground_truth}{prompt}{x}")


def test_judge_reads_a_conversation_without_any_templates_marks(store: Store) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
    with judging(lambda *_: verdict("Grade: 9")) as judge:
        wanted = config(judge, prompt="{prompt}\n{response}")
        rollout = commit_rollout(store, ["2"], 1, messages=[json.dumps(messages)])
        score(store, wanted, rollout, make_scorers(wanted))
    content = judge.requests[0]["messages"][0]["content"]
    assert content == "system: be brief\n\nuser: 1+1\n2"


def test_tokens_of_all_answers_are_counted_and_what_they_cost(store: Store) -> None:
    replies = {
        "a": [verdict("Grade: 1", (100, 10))],
        "b": [verdict("Hm.", (200, 20)), verdict("Grade: 2", (201, 21))],  # both are paid
        "c": [verdict("Grade: 3", None)],
        "d": [verdict("Hm.", (1, 2)), verdict("Hm.", (3, 4)), verdict("Hm.", (5, 6))],
    }
    with judging(lambda text, attempt: replies[text][attempt - 1]) as judge:
        wanted = config(judge, price_per_million_tokens={"input": 2.0, "output": 10.0})
        rows, metrics = graded(store, list(replies), wanted)
        judge.answer = lambda *_: verdict("Grade: 4", (1000, 1))
        rollout = commit_rollout(store, list(replies), 4, ["42"] * 4)
        again = score(store, wanted, rollout, make_scorers(wanted), stage.retry_errors)
    used = [(row["input_tokens.judge"], row["output_tokens.judge"]) for row in rows]
    assert used == [(100, 10), (401, 41), (None, None), (9, 12)]
    assert metrics["score/judge/input_tokens"] == 510
    assert metrics["score/judge/output_tokens"] == 63
    assert metrics["score/judge/cost"] == pytest.approx((510 * 2 + 63 * 10) / 1e6)
    # The first attempts have been paid too.
    assert again.manifest.metrics["score/judge/input_tokens"] == 1510
    rounds = over_rounds([again.manifest, again.manifest])
    assert rounds["score/judge/input_tokens"] == 3020
    assert rounds["score/judge/cost"] == pytest.approx(2 * (1510 * 2 + 64 * 10) / 1e6)


def test_key_of_the_environment_is_sent_and_never_written_even_where_it_is_repeated(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARBITER_KEY", f"{KEY}\n")
    replies = {
        "a": Reply(f"bad key {KEY}", 401),
        "b": Reply(json.dumps({"error": {"message": "x" * 170 + KEY}}), 500),
        "c": verdict(f"the key is {KEY}"),
        "d": verdict("Grade: 10"),
    }
    with judging(lambda text, _: replies[text]) as judge:
        wanted = config(judge, api_key_env="ARBITER_KEY", attempts=1)
        rows, _ = graded(store, list(replies), wanted)
    assert [row["reward"] for row in rows] == [None, None, None, 1.0]
    assert set(judge.keys) == {f"Bearer {KEY}"}
    told = json.dumps(rows) + wanted.model_dump_json()
    assert "bad key ***" in told
    # Not even the part of it that a cut would have left.
    assert KEY[:10] not in told
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [data for data in written if KEY[:10].encode() in data]


def test_requests_keep_to_their_rate(store: Store) -> None:
    with judging(lambda *_: verdict("Grade: 9")) as judge:
        start = time.monotonic()
        graded(store, ["a", "b", "c", "d"], config(judge, requests_per_minute=600))
        assert time.monotonic() - start > 0.3  # three gaps of a tenth of a second


def test_retry_after_is_waited_for(store: Store) -> None:
    busy = Reply("wait", 429, {"Retry-After": "0.4"})
    replies = [busy, verdict("Grade: 9")]
    with judging(lambda _, attempt: replies[attempt - 1]) as judge:
        start = time.monotonic()
        rows, _ = graded(store, ["a"], config(judge))
        assert time.monotonic() - start > 0.4
    assert rows[0]["reward"] == 0.9


def test_judge_of_a_thread_with_many_at_once_keeps_answers_apart() -> None:
    rows = [
        {"text": str(n % 11), "prompt_text": "p", "messages": None, "ground_truth": "t"}
        for n in range(200)
    ]
    found: dict[int, Any] = {}
    with judging(lambda text, _: verdict(f"Grade: {text}", (n_tokens(text), 1))) as judge:
        asked = Judge(JudgeSpec(**spec(judge.url, concurrency=50)), workers=1)
        thread = threading.Thread(target=lambda: found.update(asked.score(rows)))
        thread.start()
        thread.join()
    assert [found[n].value for n in range(200)] == [n % 11 / 10 for n in range(200)]
    assert [found[n].usage for n in range(200)] == [(n_tokens(str(n % 11)), 1) for n in range(200)]


def n_tokens(text: str) -> int:
    return 100 + int(text)


@pytest.mark.parametrize(
    ("fields", "answer", "reward"),
    [
        ({}, "Grade: 3. On second thought: Grade: 7", 0.7),
        ({}, "Grade: 10", 1.0),
        ({"scale": [-5, 5]}, "Grade: -5", 0.0),
        ({"scale": [1, 5], "pattern": r"\[\[(\d)\]\]"}, "[[2]]", 0.25),
        ({"pattern": None, "json_key": "score"}, 'It is {"score": 4, "why": "x"}.', 0.4),
        ({"pattern": None, "json_key": "score"}, '```json\n{"score": "8.5"}\n```', 0.85),
        ({"pattern": None, "json_key": "score"}, '{"score": 1} {"score": 2} {"else": 3} {', 0.2),
        ({}, "no grade", None),
        ({}, "Grade: high", None),
        ({}, "Grade: -1", None),
        ({"pattern": None, "json_key": "score"}, '{"score": true}', None),
        ({"pattern": None, "json_key": "score"}, '{"score": null}', None),
        ({"pattern": None, "json_key": "score"}, '{"score": [3]}', None),
        ({"pattern": None, "json_key": "score"}, '{"score": Infinity}', None),
        ({"pattern": None, "json_key": "score"}, '{"points": 3}', None),
        ({"pattern": None, "json_key": "score"}, '{"a":' * 9000, None),
    ],
)
def test_verdict_is_the_last_one_on_the_scale_or_none(
    fields: dict[str, Any], answer: str, reward: float | None
) -> None:
    judge = JudgeSpec(**spec(**fields))
    if reward is None:
        with pytest.raises(NoVerdictError):
            read_verdict(judge, answer)
    else:
        assert read_verdict(judge, answer) == pytest.approx(reward)


def test_options_are_sent_and_null_leaves_a_field_out(store: Store) -> None:
    options = {"temperature": None, "max_tokens": None, "max_completion_tokens": 900, "seed": 3}
    with judging(lambda *_: verdict("Grade: 9")) as judge:
        graded(store, ["a"], config(judge, options=options))
    names = {"model", "messages", "max_completion_tokens", "seed"}
    assert set(judge.requests[0]) == names


def test_rubric_counts_by_its_text_and_not_by_its_file(tmp_path: Path) -> None:
    def digest(prompt: str) -> str:
        return reward_digests([JudgeSpec(**spec(prompt=prompt))])["judge"]

    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(RUBRIC)
    assert digest(str(tmp_path / "one.txt")) == digest(str(tmp_path / "two.txt")) == digest(RUBRIC)
    (tmp_path / "two.txt").write_text(f"Be strict. {RUBRIC}")
    assert digest(str(tmp_path / "two.txt")) != digest(RUBRIC)
