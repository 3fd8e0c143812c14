"""What of a run the kept policies need: reachability over manifests, and nothing else.

A policy is within reach by its snapshot, or by replay: the rollouts and scores of every update
since the newest snapshot before it, or since the base model. Of a kept policy, its own iteration's
samples stay too, for whoever asks what it was trained on. Evaluations stay always: they say what a
policy was after it is gone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from artifacts.keep_rules import Versions
from artifacts.manifests import FILE_NAME, Manifest, read_manifest
from artifacts.pins import Pin
from artifacts.round_metrics import over_rounds
from artifacts.rounds import inputs_to_rounds, read_folders
from artifacts.store import Store
from artifacts.tombstones import FILE_NAME as TOMBSTONE


@dataclass(frozen=True)
class Catalog:
    """Every commit of a run and of what it inherits, by folder; and those that are retired."""

    manifests: Mapping[str, Manifest]
    retired: frozenset[str]

    @cached_property
    def updates(self) -> dict[int, list[str]]:
        """Folders of the updates by the version of the policy that they made, in order."""
        found: dict[int, list[str]] = {}
        for folder, manifest in self.manifests.items():
            if manifest.kind == "update":
                found.setdefault(int(manifest.outcome["policy_version"]), []).append(folder)
        return dict(sorted(found.items()))

    @cached_property
    def snapshots(self) -> dict[str, str]:
        """Folder of the snapshot of the policy after each update that has one to be read."""
        return {
            manifest.inputs["update"].path: folder
            for folder, manifest in self.manifests.items()
            if manifest.kind == "policy" and folder not in self.retired
        }

    @property
    def newest(self) -> int:
        """The newest policy's version; 0 is the base model."""
        return max(self.updates, default=0)


def read_catalog(store: Store, listed: Iterable[str]) -> Catalog:
    """The catalog of the run whose files, its parents' too, are ``listed``.

    Raises:
        IntegrityError: a manifest can't be read. Then nothing can be said of what it needs.
    """
    paths = set(listed)
    folders = [path.removesuffix(f"/{FILE_NAME}") for path in sorted(paths) if is_commit(path)]
    manifests = {folder: read_manifest(store, folder) for folder in folders}
    return Catalog(manifests, frozenset(f for f in folders if f"{f}/{TOMBSTONE}" in paths))


def is_commit(path: str) -> bool:
    """Whether ``path`` is where a stage's manifest lies."""
    top, *below = path.split("/")
    is_stage = top in ("prompts", "policy") or top.startswith(("iteration-", "evaluation-"))
    return is_stage and below[-1:] == [FILE_NAME]


def iteration_of(catalog: Catalog, update: str) -> set[str]:
    """Folders of an update and of what it was made from: its rollouts and their scores."""
    inputs = catalog.manifests[update].inputs
    made = {update, *read_folders(inputs)}
    return made & catalog.manifests.keys()


def rebuild_path(catalog: Catalog, update: str) -> set[str] | None:
    """Folders that the policy after ``update`` is rebuilt from; None where one is retired."""
    path: set[str] = set()
    while update in catalog.manifests:
        if snapshot := catalog.snapshots.get(update):
            return path | {snapshot}
        inputs = catalog.manifests[update].inputs
        if read_folders(inputs) & catalog.retired:
            return None
        path |= iteration_of(catalog, update)
        if inputs["policy"].path == "model":
            return path
        update = inputs["policy"].path
    return None


def versions_within_reach(catalog: Catalog) -> Versions:
    """The versions that rules choose from, each with the metrics of its iteration."""
    return {
        version: {
            name: value
            for update in catalog.updates[version]
            for name, value in metrics_of(catalog, update).items()
        }
        for version in rebuildable(catalog)
    }


def metrics_of(catalog: Catalog, update: str) -> dict[str, float | None]:
    """The metrics of the iteration of ``update``: over its rounds, and the update's own."""
    made = catalog.manifests[update]
    metrics: dict[str, float | None] = {}
    for refs in zip(*inputs_to_rounds(made.inputs), strict=True):
        rounds = [catalog.manifests[r.path] for r in refs if r.path in catalog.manifests]
        metrics |= over_rounds(rounds) if rounds else {}
    return {**metrics, **made.metrics}


def rebuildable(catalog: Catalog) -> list[int]:
    """Versions of the policies that are within reach, in order."""
    return [
        version
        for version, updates in catalog.updates.items()
        if any(rebuild_path(catalog, update) is not None for update in updates)
    ]


def needed(catalog: Catalog, kept: Iterable[int], pins: Iterable[Pin] = ()) -> set[str]:
    """Folders whose files have to stay for the policies ``kept``, the newest, and the ``pins``.

    The unfinished iteration, the prompts and evaluations stay always, and so does whatever is of no
    known kind.
    """
    pins = list(pins)
    versions = {catalog.newest, *kept, *(version for pin in pins for version in pin.policies)}
    iterations = {iteration for pin in pins for iteration in pin.iterations}
    folders = {f for f in catalog.manifests if _stays_always(catalog, f, iterations)}
    for update in (u for v in versions for u in catalog.updates.get(v, [])):
        folders |= iteration_of(catalog, update) | (rebuild_path(catalog, update) or set())
    return folders


def _stays_always(catalog: Catalog, folder: str, iterations: set[int]) -> bool:
    top, number, *_ = folder.split("/")
    if top == "policy":
        return int(number) > catalog.newest
    is_evaluation = top.startswith("evaluation-")
    if is_evaluation or catalog.manifests[folder].kind not in ("rollouts", "scores", "update"):
        return True
    iteration = int(top.removeprefix("iteration-"))
    return iteration > catalog.newest or iteration in iterations
