"""The score stage over real stores and workers: nulls, errors, deaths, retries, the same bytes."""

import io
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest

import tiny
from artifacts.manifests import Shard, read_manifest
from artifacts.shards import read_shard
from artifacts.store import Store
from artifacts.verification import verify
from handmade import inputs_of
from scoring import commit_rollout, make_scorers, reward_file, rows_of, score
from stages.contract import StageError
from stages.ledger import read_ledger
from stages.ray_cluster import RayCluster
from stages.score import run as stage
from stages.score import scorers as scorers_module
from stages.score.config import ScoreConfig
from stages.score.rewards import reward_digests
from stages.score.tokens import token_texts
from stages.update.config import UpdateConfig
from stages.update.samples import read_samples

SOURCE = """
import os
import signal
from pathlib import Path

HERE = Path(__file__).parent


def length(text, **row):
    return float(len(text))


def abstains(text, n, **row):
    return [1, None, 0, 1][n % 4]


def raises(text, n, **row):
    if n % 4 == 1:
        raise KeyError(text)
    return 1.0


def process(text, **row):
    return os.getpid()


def too_short(batch):
    return [1.0] * (len(batch) - 1)


def flaky(text, n, **row):
    if n in (1, 4) and not (HERE / "well").exists():
        raise ConnectionError(f"service is down, at {HERE}/service.sock")
    return float(n)


def called(text, n, **row):
    with open(HERE / "calls", "a") as file:
        file.write(f"{n}\\n")
    return float(n)


def kills_worker_once(text, n, **row):
    mark = HERE / "killed"
    if n == 4 and not mark.exists():
        mark.touch()
        os.kill(os.getppid(), signal.SIGKILL)
    return called(text, n)


def kills_worker(text, n, **row):
    if n == 4:
        os.kill(os.getppid(), signal.SIGKILL)
    return float(n)
"""
TEXTS = [chr(97 + n) * (n + 1) for n in range(10)]


@pytest.fixture(scope="module")
def ray():
    with pytest.MonkeyPatch.context() as patch:
        # A worker of the tests' own is found by its name in other processes too.
        path = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        cluster = RayCluster(None)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "code").mkdir()
    return reward_file(tmp_path / "code", SOURCE)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "run"))


def config(source: str, *names: str, **fields) -> ScoreConfig:
    return ScoreConfig(rewards=[{"fn": f"{source}:{name}"} for name in names], **fields)


def ledger(store: Store, made) -> list[dict]:
    return read_ledger(store, made.folder, made.manifest.provenance["ledger"])


def test_reward_that_abstains_is_null_and_no_zero(store, source) -> None:
    wanted = config(source, "abstains", "length")
    made = score(store, wanted, commit_rollout(store, TEXTS[:4], 2), make_scorers(wanted))
    rows = rows_of(store, made)
    assert [row["reward.abstains"] for row in rows] == [1.0, None, 0.0, 1.0]
    assert [row["reward"] for row in rows] == [2.0, None, 3.0, 5.0]
    assert [row["error"] for row in rows] == [None] * 4
    metrics = made.manifest.metrics
    assert metrics["reward/mean"] == pytest.approx(10 / 3)
    assert metrics["reward/abstains"] == pytest.approx(2 / 3)
    assert metrics["reward/abstains_null_share"] == 0.25
    assert metrics["reward/length_std"] == pytest.approx(1.25**0.5)
    assert (metrics["reward/length_min"], metrics["reward/length_max"]) == (1.0, 4.0)
    assert metrics["score/null_share"] == 0.25
    assert metrics["score/error_share"] == 0.0


def test_reward_that_fails_is_a_record_without_place_or_worker(store, source) -> None:
    wanted = config(source, "raises")
    made = score(store, wanted, commit_rollout(store, TEXTS[:4], 2), make_scorers(wanted))
    (record,) = json.loads(rows_of(store, made)[1]["error"])
    assert record == {
        "function": "raises",
        "sample_id": "000001-00000-001",
        "shard": 0,
        "type": "KeyError",
        "message": "'bb'",
        "traceback": ["rewards.py:19 in raises"],
    }
    assert {(entry["unit"], entry["attempt"]) for entry in ledger(store, made)} == {
        ("shard-00000", 1),
        ("shard-00001", 1),
    }
    assert all(entry["worker"].startswith("scorer-0:") for entry in ledger(store, made))


def test_errors_above_the_allowed_share_stop_the_stage_and_are_called_anew(store, source) -> None:
    wanted = config(source, "flaky", max_error_share=0.15)
    rollout = commit_rollout(store, TEXTS, 2)
    with pytest.raises(StageError) as caught:
        score(store, wanted, rollout, make_scorers(wanted))
    said = str(caught.value)
    assert "errors in 2 of 10 samples, more than score.max_error_share 0.15: flaky on 2" in said
    assert "sample 000001-00000-001: flaky raised ConnectionError: service is down" in said
    work = stage.score_work(1, wanted, reward_digests(wanted.rewards), rollout, None)
    assert stage.find_scores(store, work) is None
    # Whole shards are kept; those with an error are not, so that the next attempt calls again.
    (Path(source).parent / "well").touch()
    made = score(store, wanted, rollout, make_scorers(wanted))
    assert [row["reward"] for row in rows_of(store, made)] == [float(n) for n in range(10)]
    assert made.manifest.provenance["found"] == 1


def test_errors_at_the_allowed_share_do_not_stop_the_stage(store, source) -> None:
    wanted = config(source, "flaky", max_error_share=0.2)
    made = score(store, wanted, commit_rollout(store, TEXTS, 2), make_scorers(wanted))
    assert made.manifest.metrics["score/error_share"] == pytest.approx(0.2)


def test_null_where_none_is_allowed_fails_and_says_which(store, source) -> None:
    wanted = config(source, "abstains", on_null="fail")
    with pytest.raises(StageError, match="sample 000001-00000-001: a reward abstained"):
        score(store, wanted, commit_rollout(store, TEXTS[:4], 2), make_scorers(wanted))


def test_retry_calls_failed_samples_alone_and_commits_beside(store, source) -> None:
    wanted = config(source, "flaky", "called")
    rollout = commit_rollout(store, TEXTS, 4)
    first = score(store, wanted, rollout, make_scorers(wanted))
    calls = Path(source).parent / "calls"
    calls.unlink()
    (Path(source).parent / "well").touch()
    again = score(store, wanted, rollout, make_scorers(wanted), stage.retry_errors)
    assert sorted(calls.read_text().split()) == ["1", "4"]
    assert [row["reward"] for row in rows_of(store, again)] == [2.0 * n for n in range(10)]
    assert [row["error"] for row in rows_of(store, again)] == [None] * 10
    assert again.folder != first.folder
    assert again.manifest.inputs["retry_of"] == first.ref
    # What was committed first is untouched, and the end of the chain is what counts now.
    assert read_manifest(store, first.folder, first.manifest.digest)
    assert score(store, wanted, rollout, make_scorers(wanted)).ref == again.ref
    assert verify(store).problems == []
    # Without errors there is nothing to retry.
    assert score(store, wanted, rollout, make_scorers(wanted), stage.retry_errors).was_reused


def test_values_of_a_critic_lie_with_their_samples_and_outlive_a_retry(store, source) -> None:
    wanted = config(source, "flaky")
    rollout = commit_rollout(store, TEXTS, 4)

    def values(_: Store, folder: str, shard: Shard) -> list[np.ndarray]:
        # Of each token: its shard's digest as a number, and its place.
        lengths = [len(r) for r in read_shard(store, folder, shard)["response_ids"].to_pylist()]
        return [float(int(shard.digest[:4], 16)) + np.arange(n, dtype=np.float32) for n in lengths]

    first = score(store, wanted, rollout, make_scorers(wanted), critic=lambda: values)
    expected = [
        row.tolist() for s in rollout.manifest.shards for row in values(store, rollout.folder, s)
    ]
    assert [row["values"] for row in rows_of(store, first)] == expected
    (Path(source).parent / "well").touch()
    again = score(store, wanted, rollout, make_scorers(wanted), stage.retry_errors)
    assert again.ref != first.ref
    assert [row["values"] for row in rows_of(store, again)] == expected
    assert verify(store).problems == []


def test_values_that_do_not_fit_their_responses_are_found_by_verify(store, source) -> None:
    wanted = config(source, "length")
    rollout = commit_rollout(store, TEXTS, 4)

    def short(_: Store, folder: str, shard: Shard) -> list[np.ndarray]:
        return [np.zeros(1, np.float32)] * shard.rows

    score(store, wanted, rollout, make_scorers(wanted), critic=lambda: short)
    (problem,) = verify(store).problems
    assert "values has not one entry a response token" in problem


def test_retry_that_fails_again_is_a_link_of_the_chain_too(store, source) -> None:
    wanted = config(source, "flaky")
    rollout = commit_rollout(store, TEXTS, 4)
    made = [score(store, wanted, rollout, make_scorers(wanted))]
    for _ in range(2):
        made.append(score(store, wanted, rollout, make_scorers(wanted), stage.retry_errors))
    (Path(source).parent / "well").touch()
    made.append(score(store, wanted, rollout, make_scorers(wanted), stage.retry_errors))
    assert len({m.folder for m in made}) == 4
    assert [m.manifest.metrics["score/error_share"] for m in made] == [
        pytest.approx(share) for share in (0.2, 0.2, 0.2, 0.0)
    ]
    assert score(store, wanted, rollout, make_scorers(wanted)).ref == made[-1].ref


def test_retry_of_what_is_not_scored_is_refused(store, source) -> None:
    wanted = config(source, "flaky")
    rollout = commit_rollout(store, TEXTS, 4)
    with pytest.raises(StageError, match="no committed scores"):
        score(store, wanted, rollout, make_scorers(wanted), stage.retry_errors)


def test_token_rewards_stand_beside_the_reward_and_are_counted_once(store, tmp_path) -> None:
    model = str(tiny.save_model(tmp_path / "model"))
    wanted = ScoreConfig(
        rewards=[
            {"fn": "length", "options": {"maximum": 9}},
            {"fn": "keyword_tokens", "per_token": True, "weight": 2.0}
            | {"options": {"words": {"0": 0.5}}},
        ]
    )
    # Token 4 is the character 0.
    assert token_texts(model, [4, 5, 4, 2]) == ["0", "1", "0", ""]
    rollout = commit_rollout(store, ["000", "00"], 2)
    made = score(store, wanted, rollout, make_scorers(wanted, model=model))
    rows = rows_of(store, made)
    assert [row["token_rewards"] for row in rows] == [[1.0] * 3, [1.0] * 2]
    assert [row["reward.keyword_tokens"] for row in rows] == [1.5, 1.0]
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    assert made.manifest.metrics["reward/mean"] == 1.0 + 2.5
    assert verify(store).problems == []


def test_token_rewards_reach_the_update_once(store, tmp_path) -> None:
    model = str(tiny.save_model(tmp_path / "model"))
    tokens = {"fn": "keyword_tokens", "per_token": True, "weight": 2.0}
    wanted = ScoreConfig(
        rewards=[
            {"fn": "format", "options": {"pattern": "00"}},
            tokens | {"options": {"words": {"0": 0.5}}},
            {"fn": "length", "options": {"maximum": 2}, "weight": 0.0},
        ]
    )
    rollout = commit_rollout(store, ["000", "00"], 2)
    made = score(store, wanted, rollout, make_scorers(wanted, model=model))

    def advantages(estimator: str) -> list[float]:
        config = UpdateConfig(advantage=estimator)
        samples = read_samples(store, inputs_of(rollout, made), config, "drop_sample")
        return [float(values[0]) for values in samples.advantages]

    # Totals of 0 + 3 and 1 + 2: equal, so that each less the other is nothing.
    assert advantages("rloo") == [0.0, 0.0]
    # One part up and the other down by one deviation each, both of weight 1: nothing again.
    assert advantages("gdpo") == [0.0, 0.0]


def test_debug_rewards_run_in_this_process_and_that_is_said_once(store, source) -> None:
    said = io.StringIO()
    log, handler = logging.getLogger("ratchet"), logging.StreamHandler(said)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    wanted = config(source, "length", "process")
    try:
        made = score(store, wanted, commit_rollout(store, TEXTS, 2), make_scorers(wanted))
    finally:
        log.removeHandler(handler)
    assert {row["reward.process"] for row in rows_of(store, made)} == {float(os.getpid())}
    assert said.getvalue().count("timeouts can't end a call") == 1


@pytest.mark.real
def test_batch_of_the_wrong_length_stops_the_stage_before_anything_is_written(
    ray, store, source
) -> None:
    wanted = ScoreConfig(rewards=[{"fn": f"{source}:too_short", "batched": True}])
    rollout = commit_rollout(store, TEXTS, 5)
    pool = make_scorers(wanted, ray, 1)
    with pytest.raises(StageError) as caught:
        score(store, wanted, rollout, pool)
    pool.drop()
    assert str(caught.value) == "reward 'too_short': expected 5 for 5 samples, got 4"
    work = stage.score_work(1, wanted, reward_digests(wanted.rewards), rollout, None)
    assert not [name for name in store.names(work.folder) if not name.startswith("attempt")]


@pytest.mark.real
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_scores_are_the_same_bytes_on_any_number_of_workers(
    ray, store, tmp_path, source, workers
) -> None:
    wanted = config(source, "flaky", "abstains", "length")
    here = score(store, wanted, commit_rollout(store, TEXTS, 3), make_scorers(wanted))
    other = Store(str(tmp_path / "other"))
    pool = make_scorers(wanted, ray, workers)
    there = score(other, wanted, commit_rollout(other, TEXTS, 3), pool)
    pool.drop()
    assert there.manifest.digest == here.manifest.digest
    assert len({entry["worker"] for entry in ledger(other, there)}) <= workers


def undisturbed(tmp_path: Path, wanted: ScoreConfig, per_shard: int) -> str:
    """Digest of the same scoring where nothing dies."""
    store = Store(str(tmp_path / "undisturbed"))
    made = score(store, wanted, commit_rollout(store, TEXTS, per_shard), make_scorers(wanted))
    return made.manifest.digest


@pytest.mark.real
def test_worker_that_dies_on_a_sample_is_replaced_and_no_row_is_twice(
    ray, store, tmp_path, source
) -> None:
    wanted = config(source, "kills_worker_once")
    rollout = commit_rollout(store, TEXTS, 2)
    pool = make_scorers(wanted, ray, 2)
    made = score(store, wanted, rollout, pool)
    pool.drop()
    ids = [row["sample_id"] for row in rows_of(store, made)]
    assert len(ids) == len(set(ids)) == 10
    assert made.manifest.digest == undisturbed(tmp_path, wanted, 2)
    # Counted by the function itself, by the ledger, and in the manifest.
    attempts = {entry["unit"]: entry["attempt"] for entry in ledger(store, made)}
    assert attempts == {f"shard-{n:05d}": 2 if n == 2 else 1 for n in range(5)}
    assert made.manifest.provenance["workers_lost"] == 1


@pytest.mark.real
def test_worker_that_dies_between_writing_and_reporting_leaves_ten_rows(
    ray, store, tmp_path, source, monkeypatch
) -> None:
    wanted = config(source, "called")
    rollout = commit_rollout(store, TEXTS, 4)
    monkeypatch.setattr(scorers_module, "_WORKER", "dying_worker:DyingScoreWorker")
    pool = make_scorers(wanted, ray, 1)
    made = score(store, wanted, rollout, pool)
    pool.drop()
    calls = (Path(source).parent / "calls").read_text().split()
    assert len(calls) == 10 + 4  # shard 1 twice
    ids = [row["sample_id"] for row in rows_of(store, made)]
    assert len(ids) == len(set(ids)) == 10
    assert made.manifest.provenance["workers_lost"] == 1
    assert len([n for n in store.names(made.folder) if n.startswith("shard-")]) == 3
    monkeypatch.undo()
    assert made.manifest.digest == undisturbed(tmp_path, wanted, 4)


@pytest.mark.real
def test_reward_models_worker_that_dies_is_replaced_and_its_readings_are_in_the_ledger(
    ray, store, tmp_path, source, monkeypatch
) -> None:
    folder = tiny.save_classifier(tmp_path / "rm")
    functions = config(source, "length").rewards
    wanted = ScoreConfig(rewards=[{"model": str(folder), "name": "rm"}, *functions])
    rollout = commit_rollout(store, TEXTS, 4)
    monkeypatch.setattr(
        scorers_module, "_REWARD_MODEL_WORKER", "dying_worker:DyingRewardModelWorker"
    )
    pool = make_scorers(wanted, ray, 1)
    made = score(store, wanted, rollout, pool)
    pool.drop()
    attempts = {entry["unit"]: entry["attempt"] for entry in ledger(store, made)}
    assert attempts == {f"shard-{n:05d}": 1 for n in range(3)} | {
        f"shard-{n:05d}.rm": 1 + (n == 1) for n in range(3)
    }
    assert made.manifest.provenance["workers_lost"] == 1
    assert made.manifest.provenance["made"] == 3
    monkeypatch.undo()
    assert made.manifest.digest == undisturbed(tmp_path, wanted, 4)


@pytest.mark.real
def test_workers_that_die_again_and_again_fail_the_stage_with_the_sample(
    ray, store, source
) -> None:
    wanted = config(source, "kills_worker", retries=2)
    rollout = commit_rollout(store, TEXTS, 5)
    pool = make_scorers(wanted, ray, 1)
    with pytest.raises(StageError) as caught:
        score(store, wanted, rollout, pool)
    assert str(caught.value) == (
        "score worker scorer-0 died on shard 0, as did 2 before it (score.retries is 2); the "
        "sample in hand was 000001-00002-000 (reward kills_worker, prompt of 8 characters, "
        "response of 5 tokens)"
    )
    work = stage.score_work(1, wanted, reward_digests(wanted.rewards), rollout, None)
    assert not any("manifest" in name for name in store.names(work.folder))
    assert stage.find_scores(store, work) is None
