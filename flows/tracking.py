"""The door to MLflow: one MLflow run for a training run, fed from committed manifests.

Publishing happens in a thread of its own, so training waits for no server; a failure is counted,
said once, and made up for at the next chance, after a restart too. What is published comes from
manifests and carries their times, so that publishing again gives the same points.

    <store>/<run>/tracking.json     which MLflow run, at which server
    <store>/mlartifacts/            where MLflow keeps files, if no server of its own does
    <store>/mlflow.db               where MLflow keeps the rest, if no URI is given
"""

import json
import logging
import os
import queue
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from artifacts.errors import AlreadyExistsError, IntegrityError
from artifacts.secrets import redacted
from artifacts.store import Store
from flows.iteration import Iteration
from flows.listener import Listener
from flows.plan import Plan
from flows.publication import (
    evaluation_points,
    finite,
    legal_name,
    metrics_of,
    params_of,
    renamed,
    table_tag,
    tags_of,
)
from flows.report import Report
from flows.samples import join_iteration, telling_rows
from flows.session import Session
from flows.status import TRACKING_RECORD as RECORD
from flows.tracking_place import alone_at, artifact_location, sqlite_path, tracking_uri
from stages.contract import Committed

_CLOSE_SECONDS = 30.0
_SAMPLES = "samples/iteration-{:06d}.json"
_MANIFESTS = "manifests/iteration-{:06d}.json"
_POINTS_A_CALL, _PARAMS_A_CALL, _TAGS_A_CALL, _DIGEST_LIMIT = 800, 100, 100, 36
_SETTINGS = {
    # MLflow's own defaults try a dead server for four minutes; the next iteration tries again.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    # Standard output is for what a command was asked for.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class Tracker:
    """Publishes a run in the background. Call ``open``, ``publish`` per iteration, ``close``."""

    def __init__(self, store: Store, plan: Plan, report: Report) -> None:
        self._store, self._plan, self._report = store, plan, report
        self._inbox: queue.SimpleQueue[tuple[int, Iteration] | str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # From here on the thread's own.
        self._run: TrackedRun | None = None
        self._waiting: dict[int, Iteration] = {}
        self._is_failing = False
        self.num_failures = 0

    def open(self, flow_run_id: str) -> None:
        """Find the run's MLflow run, or make it, and begin to take iterations."""
        if self._plan.config.tracking.enabled:
            self._flow_run_id = flow_run_id
            # Here, not in the thread: two threads that import at once can see half a module.
            self._attempt(self._find_run)
            self._thread = threading.Thread(target=self._serve, name="tracking", daemon=True)
            self._thread.start()

    def publish(self, iteration: int, made: Iteration) -> None:
        """Take an iteration to publish. Returns at once."""
        if self._thread is not None:
            self._inbox.put((iteration, made))

    def close(self, status: str) -> None:
        """Publish what waits and end the MLflow run with FINISHED, FAILED or KILLED."""
        if self._thread is None:
            return
        self._inbox.put(status)
        self._thread.join(_CLOSE_SECONDS)
        if self._waiting:
            self._report.say("tracking", unpublished=len(self._waiting), resume="publishes them")

    def _serve(self) -> None:
        status = None
        while status is None:
            status = self._take()
            self._attempt(self._catch_up)
        if self._run is not None:
            self._attempt(lambda: self._open_run().end(status))

    def _take(self) -> str | None:
        """All that has come in, waiting for the first; returns the status to end with."""
        item = self._inbox.get()
        while isinstance(item, tuple):
            self._waiting[item[0]] = item[1]
            if self._inbox.empty():
                return None
            item = self._inbox.get()
        return item

    def _catch_up(self) -> None:
        run = self._open_run()
        for iteration in sorted(self._waiting):
            made = self._waiting[iteration]
            if iteration > run.published:
                run.publish(iteration, made)
            if made.evaluation is not None:
                run.publish_evaluation(iteration, made.evaluation)
            del self._waiting[iteration]

    def _open_run(self) -> "TrackedRun":
        if self._run is None:
            self._find_run()
        assert self._run is not None
        return self._run

    def _find_run(self) -> None:
        self._run = TrackedRun(self._store, self._plan, self._report)
        self._run.begin(self._flow_run_id)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.num_failures += 1
            # The first of a row of failures is said; the rest are the same one again.
            if not self._is_failing:
                self._report.say("tracking", state="failing", error=_in_short(error))
            self._is_failing = True
        else:
            if self._is_failing and not self._waiting:
                self._report.say("tracking", state="caught up", failures=self.num_failures)
                self._is_failing = False


class TrackedRun:
    """The MLflow run of a training run: found by the id in the store, or made."""

    def __init__(self, store: Store, plan: Plan, report: Listener) -> None:
        self._store, self._plan, self._report = store, plan, report
        self._uri = tracking_uri(plan)
        with alone_at(self._uri):
            self._client = connect(self._uri)
            found = self._recorded() or self._make()
        self._id = found.info.run_id
        if not found.data.params:
            self._describe()
        # Published last of an iteration's points: a restart reads here how far publishing came.
        self.published = int(found.data.metrics.get("iteration", 0))

    def begin(self, flow_run_id: str) -> None:
        """Mark the run as at work."""
        self._client.update_run(self._id, status="RUNNING")
        self._client.set_tag(self._id, "prefect.flow_run_id", flow_run_id)

    def publish(self, iteration: int, made: Iteration) -> None:
        """An iteration's manifests, sample table and points; the same ones each time."""
        from mlflow.entities import Metric, RunTag

        outputs = made.outputs()
        files = {
            _MANIFESTS.format(iteration): {
                name: {"folder": c.folder, "digest": c.manifest.digest, **c.manifest.content()}
                for name, c in outputs.items()
            }
        }
        tags = {}
        if table := self._table(iteration, made):
            files[_SAMPLES.format(iteration)] = table
            tags["mlflow.loggedArtifacts"] = table_tag(iteration, _SAMPLES)
        self._upload(files)
        metrics = finite(metrics_of(made.by_stage()))
        tags |= {f"ratchet.metric.{legal}": name for legal, name in renamed(metrics).items()}
        values = {legal_name(name): value for name, value in metrics.items()}
        values["iteration"] = float(iteration)
        milliseconds = int(1000 * max(c.manifest.provenance["end"] for c in outputs.values()))
        points = [Metric(name, value, milliseconds, iteration) for name, value in values.items()]
        self._log(points, [RunTag(name, value) for name, value in tags.items()])
        self.published = iteration

    def publish_evaluation(self, version: int, made: Committed) -> None:
        """The points of an evaluation of policy ``version``; the same ones each time."""
        from mlflow.entities import Metric

        self._log([Metric(*point) for point in evaluation_points(version, made.manifest)], [])

    def end(self, status: str) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._id, status)

    def _table(self, iteration: int, made: Iteration) -> dict[str, Any] | None:
        limit = self._plan.config.tracking.samples
        if not limit:
            return None
        try:
            return telling_rows(join_iteration(self._store, made), limit)
        except (IntegrityError, OSError) as error:
            # Its shards are gone or spoiled: its points are still worth having.
            self._report.say("tracking", iteration=iteration, samples="none", error=error)
            return None

    def _upload(self, files: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory(prefix="ratchet-") as folder:
            for name, value in files.items():
                path = Path(folder, name)
                path.parent.mkdir()
                path.write_text(json.dumps(value, indent=1, ensure_ascii=False))
            self._client.log_artifacts(self._id, folder)

    def _log(self, points: list[Any], tags: list[Any]) -> None:
        while points or tags:
            self._client.log_batch(
                self._id, metrics=points[:_POINTS_A_CALL], tags=tags[:_TAGS_A_CALL]
            )
            points, tags = points[_POINTS_A_CALL:], tags[_TAGS_A_CALL:]

    def _recorded(self) -> Any:
        """The run that the store names, where this server has it."""
        from mlflow.exceptions import MlflowException

        if not self._store.exists(RECORD):
            return None
        record = json.loads(self._store.read(RECORD))
        try:
            run = self._client.get_run(record["run_id"])
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        if run.info.lifecycle_stage != "active":
            return None
        if record != json.loads(self._record_of(run)):
            # The runs were moved, and their database with them.
            self._store.put(RECORD, self._record_of(run))
        return run

    def _make(self) -> Any:
        """A new run, or that of another process which was first."""
        tags = tags_of(self._plan, self._store.url)
        experiment = find_or_make_experiment(self._client, self._uri, self._plan)
        run = self._client.create_run(experiment, run_name=self._plan.config.run, tags=tags)
        try:
            self._store.create(RECORD, self._record_of(run))
        except AlreadyExistsError:
            if theirs := self._recorded():
                self._client.delete_run(run.info.run_id)
                return theirs
            # It names a run of another server, or one that was deleted.
            self._store.put(RECORD, self._record_of(run))
        return run

    def _record_of(self, run: Any) -> bytes:
        values = {
            "uri": self._uri,
            "experiment_id": run.info.experiment_id,
            "run_id": run.info.run_id,
        }
        return json.dumps(values, sort_keys=True, indent=1).encode()

    def _describe(self) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param

        params = [Param(name, value) for name, value in params_of(self._plan).items()]
        for start in range(0, len(params), _PARAMS_A_CALL):
            self._client.log_batch(self._id, params=params[start : start + _PARAMS_A_CALL])
        paths = [source.path for source in self._plan.config.data.all_sources]
        source = json.dumps({"uri": paths[0] if len(paths) == 1 else paths})
        name, digest = Path(paths[0]).stem, self._plan.data_digest[:_DIGEST_LIMIT]
        dataset = Dataset(name, digest, source_type="local", source=source)
        tags = [InputTag("mlflow.data.context", "prompts")]
        self._client.log_inputs(self._id, [DatasetInput(dataset, tags)])


def publish_evaluation(session: Session, version: int, made: Committed) -> None:
    """Add an evaluation's points to the MLflow run of the session's run, where it has one.

    A failure is said, and fails nothing: the same evaluation, asked for again, is published again.
    """
    if not session.config.tracking.enabled or not session.store.exists(RECORD):
        return
    try:
        run = TrackedRun(session.store, session.plan, session.report)
        run.publish_evaluation(version, made)
    except Exception as error:
        session.report.say("tracking", state="failing", error=_in_short(error))


def connect(uri: str) -> Any:
    """A client of the tracking server at ``uri``; it says what goes wrong and nothing else."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import mlflow

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    path = sqlite_path(uri)
    if path is not None and not os.path.exists(path):
        _make_database(mlflow, path)
    return mlflow.MlflowClient(tracking_uri=uri)


def _make_database(mlflow: Any, path: str) -> None:
    # Beside its place, then there whole: half a migration, after a Ctrl-C, is broken for ever.
    new = f"{path}.new"
    for leftover in (new, f"{new}-journal"):
        Path(leftover).unlink(missing_ok=True)
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{new}")
    os.rename(new, path)


def find_or_make_experiment(client: Any, uri: str, plan: Plan) -> str:
    """Id of the configured experiment. Of processes that make it at once, one does."""
    name = plan.config.tracking.experiment
    found = client.get_experiment_by_name(name)
    if found is None:
        location = artifact_location(uri, plan.config.store)
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except Exception:
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _in_short(error: Exception) -> str:
    lines = str(error).splitlines()
    return redacted(f"{type(error).__name__}: {lines[0] if lines else ''}")
