"""The door to MLflow: one MLflow run for a training run, fed from committed manifests.

What is published comes from manifests and carries their times, so publishing again gives the same
points. A failure to publish never reaches training: it is counted, said, and made up for at the
next chance, after a restart too.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from artifacts.manifests import Manifest
from artifacts.runs import read_or_write
from artifacts.store import Store
from flows.plan import Plan
from flows.report import Report
from flows.samples import join_iteration, telling_rows
from flows.session import Iteration

_RECORD = "tracking.json"
_PARAM_LIMIT = 6000


class Tracker:
    """See the module's docstring."""

    def __init__(self, store: Store, plan: Plan, report: Report) -> None:
        self._store, self._plan, self._report = store, plan, report
        self._settings = plan.config.tracking
        self._client: Any = None
        self._run_id = ""
        self._published = 0
        self._waiting: dict[int, Iteration] = {}
        self.num_failures = 0

    def open(self, flow_run_id: str) -> None:
        """Find the run's MLflow run, or make it."""
        if self._settings.enabled:
            self._flow_run_id = flow_run_id
            self._attempt(self._open)

    def publish(self, iteration: int, made: Iteration) -> None:
        """Publish an iteration, and those before it that failed to be."""
        if not self._settings.enabled:
            return
        self._waiting[iteration] = made
        if self._client is None:
            self._attempt(self._open)
        if self._client is not None:
            self._attempt(self._catch_up)

    def close(self, status: str) -> None:
        """End the MLflow run with FINISHED, FAILED or KILLED."""
        if self._client is not None:
            self._attempt(self._catch_up)
            self._attempt(lambda: self._client.set_terminated(self._run_id, status))
        if self._waiting and self._settings.enabled:
            self._report.say("tracking", unpublished=len(self._waiting), resume="publishes them")

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.num_failures += 1
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self._report.say("tracking", failures=self.num_failures, error=reason)

    def _open(self) -> None:
        import mlflow

        uri = self._settings.uri or default_uri(self._plan.config.store)
        client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = self._experiment(client)
        record = (
            read_or_write(
                self._store, _RECORD, {"uri": uri, "run_id": self._create_run(client, experiment)}
            )
            if not self._store.exists(_RECORD)
            else read_or_write(self._store, _RECORD, {})
        )
        self._run_id = record["run_id"]
        self._published = int(client.get_run(self._run_id).data.metrics.get("iteration", 0))
        client.update_run(self._run_id, status="RUNNING")
        client.set_tag(self._run_id, "prefect.flow_run_id", self._flow_run_id)
        self._client = client

    def _experiment(self, client: Any) -> str:
        name = self._settings.experiment
        found = client.get_experiment_by_name(name)
        if found is None:
            try:
                location = artifact_location(self._plan.config.store)
                return str(client.create_experiment(name, artifact_location=location))
            except Exception:
                # Another run was first with the name.
                found = client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _create_run(self, client: Any, experiment: str) -> str:
        from mlflow.entities import Dataset as TrackedDataset
        from mlflow.entities import DatasetInput, InputTag, Param

        config = self._plan.config
        tags = {"ratchet.url": self._store.url, "ratchet.model_digest": self._plan.model_digest}
        run = client.create_run(experiment, run_name=config.run, tags=tags)
        run_id = str(run.info.run_id)
        params = flatten(config.model_dump(mode="json"))
        client.log_batch(
            run_id, params=[Param(k, str(v)[:_PARAM_LIMIT]) for k, v in params.items()]
        )
        dataset = TrackedDataset(
            name=Path(config.data.path).stem,
            digest=self._plan.data_digest[:36],
            source_type="local",
            source=f'{{"uri": "{config.data.path}"}}',
        )
        context = [InputTag("mlflow.data.context", "prompts")]
        client.log_inputs(run_id, [DatasetInput(dataset, context)])
        return run_id

    def _catch_up(self) -> None:
        for iteration in sorted(self._waiting):
            if iteration > self._published:
                self._publish(iteration, self._waiting[iteration])
                self._published = iteration
            del self._waiting[iteration]

    def _publish(self, iteration: int, made: Iteration) -> None:
        from mlflow.entities import Metric

        assert made.rollout is not None
        assert made.scores is not None
        assert made.update is not None
        stages = {"rollout": made.rollout, "score": made.scores, "update": made.update}
        for stage, committed in stages.items():
            name = f"manifests/iteration-{iteration:06d}-{stage}.json"
            self._client.log_dict(self._run_id, committed.manifest.content(), name)
        if self._settings.samples:
            table = telling_rows(join_iteration(self._store, made), self._settings.samples)
            name = f"samples/iteration-{iteration:06d}.json"
            self._client.log_dict(self._run_id, table, name)
        milliseconds = int(made.update.manifest.provenance["end"] * 1000)
        metrics = metrics_of({name: c.manifest for name, c in stages.items()})
        # Last of all: what a restart reads to know how far publishing came.
        metrics["iteration"] = iteration
        points = [Metric(name, value, milliseconds, iteration) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=points)


def metrics_of(manifests: Mapping[str, Manifest]) -> dict[str, float]:
    """An iteration's metrics: what stages committed, and the seconds they took."""
    metrics: dict[str, float] = {}
    for stage, manifest in manifests.items():
        metrics |= {name: v for name, v in manifest.metrics.items() if v is not None}
        metrics[f"seconds/{stage}"] = manifest.provenance["seconds"]
        for phase, seconds in manifest.provenance.get("phases", {}).items():
            metrics[f"seconds/{stage}/{phase}"] = seconds
    return metrics


def default_uri(store: str) -> str:
    """An SQLite file beside the runs, or in the working folder where the store is remote."""
    folder = Path.cwd() if "://" in store else Path(store).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}"


def artifact_location(store: str) -> str:
    """Where MLflow keeps files: beside the runs."""
    base = store.rstrip("/") if "://" in store else str(Path(store).resolve())
    return f"{base}/mlartifacts"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings to one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
