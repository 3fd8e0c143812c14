"""Whole runs on every real part, undisturbed and disturbed: the same bytes in the end."""

import json
import signal
import sqlite3
from contextlib import closing

import httpx
import psutil
import pytest

from artifacts.runs import committed
from artifacts.store import Store
from launching import (
    EVALUATE,
    STAGES,
    digests,
    file_times,
    kill_inside,
    kill_tree,
    names,
    resume_and_compare,
    start_prefect,
    wait_for_line,
    wait_until,
)
from s3_server import BUCKET

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def whole(bench):
    """The run that nobody disturbs, and the only one with evaluations."""
    bench.cli("train", "run.yaml", EVALUATE)
    return bench.url("whole")


def test_train_from_one_command_commits_every_stage_and_reports_it(bench, whole):
    found = json.loads(bench.cli("status", "runs/whole", "--json").stdout)
    assert found["is_complete"]
    assert {(r["iteration"], r["stage"]) for r in found["stages"]} == {
        (i, s) for i in (1, 2, 3) for s in STAGES
    }
    store = Store(str(whole))
    for iteration in (1, 2, 3):
        ((_, rollout),) = committed(store, iteration, "rollout")
        ((_, update),) = committed(store, iteration, "update")
        assert rollout.rows == 32
        # On unchanged weights the engine and the trainer agree: the engine's are fresh.
        assert update.metrics["mismatch/logprob_abs_max"] < 1e-4
        assert update.metrics["update/steps_finished"] == 2 * iteration
        assert update.metrics["update/reference_kl"] >= 0
    first = json.loads(bench.cli("samples", "runs/whole", "--iteration", "1", "--json").stdout)
    for row in first:  # the policy is the reference still
        assert row["reference_logprobs"] == pytest.approx(row["logprobs"], abs=1e-4)
    assert (whole / "policy").is_dir()
    assert names(whole, "policy/*") == ["000002", "000003"]


def test_evaluations_of_a_run_are_listed_and_stand_in_mlflow_at_their_policys_step(bench, whole):
    found = json.loads(bench.cli("status", "runs/whole", "--json").stdout)["evaluations"]
    assert [row["policy"] for row in found] == [0, 2, 3]
    with closing(sqlite3.connect(bench.folder / "runs" / "mlflow.db")) as database:
        for name in ("pass_at_1", "greedy_reward_mean"):
            query = "select step, value from metrics where key = ? order by step"
            points = database.execute(query, (f"evaluate/data/{name}",)).fetchall()
            expected = [(r["policy"], r["metrics"][f"evaluate/data/{name}"]) for r in found]
            assert points == expected
    bench.cli("verify", "runs/whole")


def test_samples_of_a_run_can_be_filtered_and_sorted(bench, whole):
    done = bench.cli(
        "samples",
        "runs/whole",
        "--iteration",
        "2",
        "--where",
        "tokens > 2",
        "--sort",
        "reward desc",
        "--limit",
        "5",
        "--json",
    )
    rows = json.loads(done.stdout)
    assert 0 < len(rows) <= 5
    assert [r["reward"] for r in rows] == sorted((r["reward"] for r in rows), reverse=True)
    for row in rows:
        total = row["reward.digits"] + 0.5 * row["reward.short"]
        assert row["reward"] == pytest.approx(total)
        assert len(row["logprobs"]) == row["tokens"] > 2
    assert "no such column" not in done.stderr
    wrong = bench.cli("samples", "runs/whole", "--where", "rewards > 1", check=2)
    assert "rewards" in wrong.stderr


def test_resume_of_a_complete_run_starts_nothing_and_changes_nothing(bench, whole):
    before = file_times(whole)
    done = bench.cli("resume", "runs/whole")
    assert "start" not in done.stderr
    assert "complete: all 3 iterations" in done.stderr
    assert done.stderr.count("reused") == 9 + 3 * 2  # stages; policies, sampled and greedy
    assert file_times(whole) == before


def prefect_states(bench, run, kind):
    """Names of the states of a run's flow or task runs, as Prefect's own API tells them."""
    query = {"flow_runs": {"name": {"any_": [run]}}}
    answer = httpx.post(f"{bench.env['PREFECT_API_URL']}/{kind}/filter", json=query)
    return [row["state_name"] for row in answer.raise_for_status().json()]


def test_run_killed_in_its_score_and_again_in_its_update_resumes_to_the_same_bytes(bench, whole):
    killed = kill_inside(bench, "score", "update")
    done = resume_and_compare(bench, killed, whole)
    assert done.stderr.count("reused") == 3 + STAGES.index("update")
    reused = sum(3 + STAGES.index(stage) for stage in killed.kept)
    wait_until(lambda: prefect_states(bench, killed.run, "task_runs").count("Reused") == reused)
    ((_, manifest),) = committed(Store(str(bench.url(killed.run))), 2, "score")
    assert manifest.provenance["found"] == killed.kept["score"] > 0
    assert manifest.provenance["made"] + killed.kept["score"] == len(manifest.shards) == 4


@pytest.mark.slow
def test_run_whose_prefect_server_dies_is_resumed_without_one(bench, whole, free_port):
    # Prefect's own default tries a dead server for minutes before it gives up.
    api = f"http://127.0.0.1:{free_port}/api"
    env = {"PREFECT_API_URL": api, "PREFECT_CLIENT_MAX_RETRIES": "0"}
    server = start_prefect(free_port, bench.folder / "mortal")
    process = bench.launch("train", "run.yaml", "--run", "orphaned", **env)
    wait_for_line(process, "start .*stage=score .*iteration=2")
    server.kill()
    server.wait()
    process.communicate(timeout=300)
    done = bench.cli("resume", "runs/orphaned", **env)
    assert f"{api} doesn't answer" in done.stderr
    assert digests(bench.url("orphaned")) == digests(whole)


def test_run_with_a_failing_reward_ends_as_failed_and_says_what_is_missing(bench):
    (bench.folder / "failing.py").write_text(
        "def third(sample_id, **row):\n"
        "    if sample_id.startswith('000001-00004'):\n"
        "        raise ValueError('no answer in it')\n"
        "    return 1.0\n"
    )
    rewards = "score={rewards: [{fn: 'failing.py:third'}], on_null: fail}"
    done = bench.cli("train", "run.yaml", rewards, "--run", "failing", check=1)
    assert "third raised ValueError: no answer in it" in done.stderr
    assert "000001-00004" in done.stderr
    wait_until(lambda: prefect_states(bench, "failing", "flow_runs") == ["Failed"])
    found = json.loads(bench.cli("status", "runs/failing", "--json").stdout)
    states = {row["stage"]: row["state"] for row in found["stages"]}
    assert states == {"rollout": "committed", "score": "partial"}
    assert (found["finished_iterations"], found["is_complete"]) == (0, False)


def test_run_told_to_end_ends_its_workers_and_goes_on_without_a_prefect_server(
    bench, whole, free_port
):
    process = bench.launch("train", "run.yaml", "--run", "interrupted")
    wait_for_line(process, r"start .*stage=score .*iteration=2")
    workers = kill_tree(process, signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    assert "ratchet resume" in process.stderr.read()
    wait_until(lambda: prefect_states(bench, "interrupted", "flow_runs") == ["Crashed"])
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    api = f"http://127.0.0.1:{free_port}/api"
    done = bench.cli("resume", "runs/interrupted", PREFECT_API_URL=api)
    assert f"{api} doesn't answer" in done.stderr
    assert digests(bench.url("interrupted")) == digests(whole)


def test_run_whose_workers_are_killed_replaces_them_and_goes_on(bench, whole):
    process = bench.launch("train", "run.yaml", "retries.delay_seconds=0.1", "--run", "lost")
    for worker, iteration in (("RolloutWorker", 2), ("TrainerRank", 3)):
        wait_for_line(process, rf"start .*stage=rollout .*iteration={iteration}")
        workers = psutil.Process(process.pid).children(recursive=True)
        next(p for p in workers if p.name().startswith(f"ray::{worker}")).kill()
    log = process.stderr.read()
    assert process.wait() == 0, log[-3000:]
    assert digests(bench.url("lost")) == digests(whole)


def test_debug_run_in_one_process_trains_the_same_way(bench, whole):
    bench.cli("train", "run.yaml", "iterations=1", "--run", "debug", "--debug")
    store = Store(str(bench.url("debug")))
    ((_, ours),) = committed(store, 1, "rollout")
    ((_, theirs),) = committed(Store(str(whole)), 1, "rollout")
    assert ours.digest == theirs.digest
    assert committed(store, 1, "update")


def test_run_on_s3_commits_the_bytes_that_it_commits_on_disk(bench, whole, s3_server):
    env = s3_server.environment
    bench.cli("train", "run.yaml", "iterations=1", f"store=s3://{BUCKET}/runs", **env)
    url = f"s3://{BUCKET}/runs/whole"
    store = Store(url)
    for stage in STAGES:
        ((_, there),) = committed(store, 1, stage)
        ((_, here),) = committed(Store(str(whole)), 1, stage)
        assert there.digest == here.digest
    assert store.names("policy") == ["000001"]
    assert bench.cli("resume", url, **env).stderr.count("reused") == 3
    rows = bench.cli("samples", url, "--limit", "2", "--json", **env)
    assert len(json.loads(rows.stdout)) == 2


def test_export_of_a_policy_runs_in_a_transformers_pipeline(bench, whole):
    import transformers

    # Iteration 1 has no snapshot: it is rebuilt from what was committed.
    for iteration in ("1", "3"):
        bench.cli("export", "runs/whole", "--to", f"out-{iteration}", "--iteration", iteration)
        pipe = transformers.pipeline(
            "text-generation", model=str(bench.folder / f"out-{iteration}")
        )
        (answer,) = pipe("12+15=", max_new_tokens=4, do_sample=False)
        assert answer["generated_text"].startswith("12+15=")
    again = bench.cli("export", "runs/whole", "--to", "out-3", check=2)
    assert "exists already" in again.stderr


def test_stage_alone_runs_from_its_committed_inputs(bench, whole):
    done = bench.cli("stage", "score", "runs/whole", "--iteration", "2")
    assert "reused" in done.stdout
