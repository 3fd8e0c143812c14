"""What a person finds in a real MLflow: all of a run, once, whatever happened meanwhile."""

import contextlib
import json
import math
import multiprocessing
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest

from artifacts.store import Store
from flows.iteration import Iteration
from flows.plan import Plan
from flows.record import open_run
from flows.report import Report, set_up_logging
from flows.session import Session
from flows.tracking import Tracker, connect, publish_evaluation, tracking_uri
from small_run import REWARDS, small_plan, small_run, write_iteration
from stages.contract import Product, find_or_make
from stages.evaluation import EvaluationWork

# What trackers refused or mixed up in the reports behind case 36.
NAMES = (
    "timing/refit",
    "timing/refit/transfer",
    "val/mean@8",
    "timing(s)/gen",
    "a//b",
    "a/b",
    "/a",
    "a/",
    "x:y",
    "größe",
    "n" * 300,
    "n" * 299 + "m",
    "a@b",
    "a_at_b",
    "a_b",
    "..",
    ".",
    "",
)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables: making them takes MLflow a second."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    connect(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def folder(tmp_path: Path, empty_database: Path) -> Path:
    """A folder of runs."""
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return tmp_path


def track(plan: Plan, made: dict[int, Any], status: str = "FINISHED") -> Tracker:
    """One process's share of a run: open, publish, close."""
    tracker = Tracker(open_run(plan).store, plan, Report())
    tracker.open("a-flow-run")
    for iteration in sorted(made):
        tracker.publish(iteration, made[iteration])
    tracker.close(status)
    return tracker


def runs(plan: Plan) -> list[Any]:
    client = connect(tracking_uri(plan))
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(client.search_runs(ids))


def points(plan: Plan, name: str) -> list[tuple[int, float, int]]:
    (run,) = runs(plan)
    history = connect(tracking_uri(plan)).get_metric_history(run.info.run_id, name)
    return sorted((point.step, point.value, point.timestamp) for point in history)


def read(plan: Plan, path: str) -> Any:
    (run,) = runs(plan)
    return json.loads(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/{path}"))


def test_tracking_of_a_run_shows_its_numbers_settings_data_and_records(folder: Path) -> None:
    plan = small_plan(folder)
    store, made = small_run(plan)
    assert track(plan, made).num_failures == 0

    (run,) = runs(plan)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "small")
    assert [(s, v) for s, v, _ in points(plan, "update/loss")] == [(1, 0.5), (2, 0.25)]
    assert [s for s, _, _ in points(plan, "rollout/tokens_per_second")] == [1, 2]
    assert run.data.metrics["seconds/update_steps"] == 0.25
    assert run.data.params["rollout.samples_per_prompt"] == "4"
    assert run.data.params["score.rewards.1.fn"] == "rewards.py:brief"
    (dataset,) = run.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("sums", "d" * 36)
    assert json.loads(dataset.dataset.source) == {"uri": "prompts/sums.jsonl"}
    assert f"ratchet samples {store.url}" in run.data.tags["mlflow.note.content"]
    assert run.data.tags["prefect.flow_run_id"] == "a-flow-run"

    manifests = read(plan, "manifests/iteration-000002.json")
    assert {stage: kept["digest"] for stage, kept in manifests.items()} == {
        "rollout": made[2].rounds[0].rollout.manifest.digest,
        "score": made[2].rounds[0].scores.manifest.digest,
        "update": made[2].update.manifest.digest,
    }
    assert manifests["update"]["inputs"]["rollout"]["path"] == made[2].rounds[0].rollout.folder


def write_evaluation(store: Store, version: int, **metrics: float | None) -> Iteration:
    """Commit an evaluation of policy ``version`` that came to ``metrics``."""
    work = EvaluationWork("evaluation", "evaluation", 1, version, {"of": sorted(metrics)}, {})
    named = {f"evaluate/data/{name}": value for name, value in metrics.items()}
    return Iteration(evaluation=find_or_make(store, work, lambda: Product([], metrics=named)))


def test_tracking_of_evaluations_shows_each_once_at_its_policys_step(folder: Path) -> None:
    plan = small_plan(folder)
    store, made = small_run(plan)
    first = write_evaluation(store, 0, pass_at_1=0.25, greedy_pass_at_1=None)
    made[2].evaluation = write_evaluation(store, 2, pass_at_1=0.5).evaluation
    for _ in range(2):
        assert track(plan, {0: first, **made}).num_failures == 0
    found = points(plan, "evaluate/data/pass_at_1")
    assert [(step, value) for step, value, _ in found] == [(0, 0.25), (2, 0.5)]
    assert found[0][2] == int(1000 * first.evaluation.manifest.provenance["end"])
    (run,) = runs(plan)
    assert "evaluate/data/greedy_pass_at_1" not in run.data.metrics  # nothing is known


def test_evaluation_beside_a_run_adds_its_points_and_leaves_the_run_as_it_ended(
    folder: Path,
) -> None:
    plan = small_plan(folder)
    store, made = small_run(plan)
    session = Session(open_run(plan))
    alone = write_evaluation(store, 1, pass_at_8=0.75).evaluation
    publish_evaluation(session, 1, alone)  # nobody tracks the run yet
    track(plan, made, status="FAILED")
    publish_evaluation(session, 1, alone)
    assert [(s, v) for s, v, _ in points(plan, "evaluate/data/pass_at_8")] == [(1, 0.75)]
    assert runs(plan)[0].info.status == "FAILED"


def test_tracking_sample_table_leads_from_failed_to_best_and_opens_as_a_table(folder: Path) -> None:
    plan = small_plan(folder, samples=3)
    rewards = [None, *REWARDS[1:]]
    _, made = small_run(plan, rewards=rewards, texts=[f"0{n}" for n in range(8)])
    track(plan, made)

    table = read(plan, "samples/iteration-000001.json")
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["reward"] for row in rows] == [None, 0.5, 1.0]
    assert "KeyError" in rows[0]["error"]
    assert (rows[1]["text"], rows[1]["ground_truth"], rows[1]["prompt_text"]) == (
        "02",
        "01",
        "0+1=",
    )
    # MLflow's page shows as tables what this tag names, and raw JSON otherwise.
    (run,) = runs(plan)
    shown = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert shown == [{"path": f"samples/iteration-{i:06d}.json", "type": "table"} for i in (1, 2)]


def test_tracking_after_a_restart_goes_on_in_the_same_run_without_a_second_point(
    folder: Path,
) -> None:
    plan = small_plan(folder, iterations=3)
    store, made = small_run(plan)
    track(plan, {1: made[1]}, "KILLED")
    before = points(plan, "reward/mean")
    made[3] = write_iteration(store, 3)
    track(plan, made)
    track(plan, made)

    (run,) = runs(plan)
    assert run.info.status == "FINISHED"
    after = points(plan, "reward/mean")
    assert after[:1] == before
    ends = [int(made[i].update.manifest.provenance["end"] * 1000) for i in (1, 2, 3)]
    assert [(step, stamp) for step, _, stamp in after] == list(zip((1, 2, 3), ends, strict=True))


def test_tracking_that_was_cut_off_within_an_iteration_publishes_the_same_points(
    folder: Path,
) -> None:
    plan = small_plan(folder, iterations=1)
    _, made = small_run(plan, [1])
    track(plan, made)
    before = points(plan, "reward/mean")
    client, (run,) = connect(tracking_uri(plan)), runs(plan)
    # As if the process had died before the last point, the one that a restart reads.
    client.log_metric(run.info.run_id, "iteration", 0, timestamp=2**42, step=2)
    track(plan, made)
    assert points(plan, "reward/mean") == before


def test_tracking_of_a_run_moved_with_its_database_goes_on_in_the_same_run(folder: Path) -> None:
    _, made = small_run(small_plan(folder))
    track(small_plan(folder), {1: made[1]})
    (before,) = runs(small_plan(folder))
    moved = folder.with_name(f"{folder.name}-moved")
    shutil.copytree(folder, moved)
    plan = small_plan(moved)
    track(plan, made)
    assert [run.info.run_id for run in runs(plan)] == [before.info.run_id]
    assert [step for step, _, _ in points(plan, "reward/mean")] == [1, 2]


def test_tracking_at_another_server_publishes_the_whole_run_there(
    folder: Path, empty_database: Path
) -> None:
    _, made = small_run(small_plan(folder))
    track(small_plan(folder), {1: made[1]})
    shutil.copy(empty_database, folder / "other.db")
    plan = small_plan(folder, uri=f"sqlite:///{folder}/other.db")
    track(plan, made)
    assert [step for step, _, _ in points(plan, "reward/mean")] == [1, 2]


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def no_server() -> Iterator[str]:
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
    yield uri


def no_such_scheme() -> contextlib.AbstractContextManager[str]:
    return contextlib.nullcontext("nonsense://somewhere")


@pytest.mark.parametrize("server", [no_server, silent_server, no_such_scheme])
def test_tracking_without_a_working_server_is_counted_said_once_and_caught_up_later(
    folder: Path, server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    set_up_logging()
    with server() as uri:
        plan = small_plan(folder, uri=uri)
        _, made = small_run(plan)
        assert track(plan, made).num_failures >= 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "tracking" in line]
    assert [line.split()[2].partition("=")[0] for line in lines] == ["state", "unpublished"]

    plan = small_plan(folder)
    assert track(plan, made).num_failures == 0
    assert [step for step, _, _ in points(plan, "reward/mean")] == [1, 2]


def test_tracking_of_an_iteration_costs_training_no_time_while_the_server_hangs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with silent_server() as uri:
        plan = small_plan(folder, uri=uri)
        store, made = small_run(plan)
        tracker = Tracker(store, plan, Report())
        tracker.open("a-flow-run")
        start = time.monotonic()
        for iteration in (1, 2):
            tracker.publish(iteration, made[iteration])
        assert time.monotonic() - start < 0.5
        tracker.close("KILLED")


def test_tracking_of_an_iteration_whose_shards_are_gone_still_has_its_numbers(folder: Path) -> None:
    plan = small_plan(folder)
    store, made = small_run(plan)
    store.remove(
        f"{made[1].rounds[0].rollout.folder}/{made[1].rounds[0].rollout.manifest.shards[0].name}"
    )
    assert track(plan, made).num_failures == 0
    assert [step for step, _, _ in points(plan, "reward/mean")] == [1, 2]
    assert read(plan, "samples/iteration-000002.json")["data"]


def test_tracking_of_odd_metric_names_keeps_every_value_under_a_name_that_maps_back(
    folder: Path,
) -> None:
    plan = small_plan(folder, iterations=1)
    _, made = small_run(plan, [1], **{n: float(i) for i, n in enumerate(NAMES)})
    assert track(plan, made).num_failures == 0
    (run,) = runs(plan)
    tags = run.data.tags
    original = {name: tags.get(f"ratchet.metric.{name}", name) for name in run.data.metrics}
    found = {original[name]: value for name, value in run.data.metrics.items()}
    assert {name: found[name] for name in NAMES} == {n: float(i) for i, n in enumerate(NAMES)}


def test_tracking_of_diverged_losses_keeps_nan_and_flags_infinity(folder: Path) -> None:
    plan = small_plan(folder, iterations=3)
    store, made = small_run(plan, [1], update__loss=math.nan)
    made[2] = write_iteration(store, 2, update__loss=math.inf)
    made[3] = write_iteration(store, 3, update__loss=-math.inf)
    track(plan, made)
    assert all(math.isnan(value) for _, value, _ in points(plan, "update/loss"))
    flags = points(plan, "update/loss_infinite")
    assert [(step, value) for step, value, _ in flags] == [(2, 1.0), (3, -1.0)]


def test_search_for_a_low_loss_finds_no_diverged_run(folder: Path) -> None:
    for name, loss in (("diverged", math.nan), ("best", 0.05), ("worse", 0.2)):
        plan = small_plan(folder, iterations=1, run=name)
        _, made = small_run(plan, [1], update__loss=loss)
        track(plan, made)
    client = connect(tracking_uri(plan))
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(ids, "metrics.`update/loss` < 0.1")
    assert [run.info.run_name for run in found] == ["best"]


def _database_bytes(folder: Path) -> int:
    """Size of the database, wherever it is being made."""
    sizes = [0]
    for name in ("mlflow.db", "mlflow.db.new"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append((folder / name).stat().st_size)
    return max(sizes)


@pytest.mark.usefixtures("empty_database")  # what children import, this process has imported
@pytest.mark.parametrize("num_bytes", [100_000, 300_000])
def test_tracking_killed_while_it_makes_the_database_leaves_none_that_is_broken(
    tmp_path: Path, num_bytes: int
) -> None:
    plan = small_plan(tmp_path)
    _, made = small_run(plan)
    child = multiprocessing.get_context("fork").Process(target=track, args=(plan, made))
    child.start()
    while child.is_alive() and _database_bytes(tmp_path) < num_bytes:
        time.sleep(0.0005)
    child.kill()
    child.join()
    assert track(plan, made).num_failures == 0
    assert [step for step, _, _ in points(plan, "reward/mean")] == [1, 2]


def _start_at_once(folder: Path, number: int, barrier: Any) -> None:
    plan = small_plan(folder, run=f"run-{number}", experiment="new")
    _, made = small_run(plan, [1])
    barrier.wait()
    os._exit(track(plan, made).num_failures)


@pytest.mark.usefixtures("empty_database")
def test_tracking_of_eight_runs_started_at_once_on_a_fresh_database_makes_one_experiment(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    children = [
        context.Process(target=_start_at_once, args=(tmp_path, n, barrier)) for n in range(8)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 8

    plan = small_plan(tmp_path, experiment="new")
    client = connect(tracking_uri(plan))
    names = {e.name: e.experiment_id for e in client.search_experiments()}
    assert sorted(names) == ["Default", "new"]
    assert client.search_runs([names["Default"]]) == []
    found = client.search_runs([names["new"]])
    assert sorted(run.info.run_name for run in found) == [f"run-{n}" for n in range(8)]
    for run in found:
        assert run.data.metrics["iteration"] == 1
        listed = {file.path for file in client.list_artifacts(run.info.run_id)}
        assert listed == {"manifests", "samples"}
