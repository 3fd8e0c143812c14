"""The driver's side of the trainer ranks: one group that lives, moves and dies together."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from artifacts.errors import IntegrityError
from artifacts.manifests import FILE_NAME, Manifest, Ref, Shard, read_manifest
from artifacts.rounds import read_folders
from artifacts.runs import policy_folder
from artifacts.store import Store
from artifacts.tombstones import FILE_NAME as TOMBSTONE
from artifacts.tombstones import is_retired, refuse_retired
from stages.contract import Committed, Work, find
from stages.update.critic_name import CriticName
from stages.update.memory import GIB, estimate_of, room_of_rank
from stages.update.trainer_spec import CRITIC_MODEL, TrainerSpec, UpdateOrder, UpdateResult
from stages.workers import Actor, Cluster, Pending, Placement

SNAPSHOT_VERSION = 1
_WORKER = "stages.update.trainer:TrainerRank"

log = logging.getLogger("ratchet.update")


class Trainers:
    """Ranks that hold a policy and its optimizer, kept for the run.

    Which version they hold is known here. :meth:`bring_to` makes it the one asked for: by going
    on, or from the newest snapshot and a replay of the committed updates after it.
    """

    def __init__(self, cluster: Cluster, spec: TrainerSpec, ranks: int, place: Placement) -> None:
        self._cluster = cluster
        self._spec = spec.alone() if cluster.is_local else spec
        self.num_ranks = 1 if cluster.is_local else ranks
        self._place = place
        self._actors: list[Actor] = []
        self._held: str | None = None
        self._decides_checkpointing = spec.config.activation_checkpointing == "auto"
        self._were_used = False
        self._has_stock = False

    @property
    def layout(self) -> dict[str, Any]:
        """All of the execution that decides in which order numbers are added up."""
        return {
            "ranks": self.num_ranks,
            "sp": self._spec.config.sp,
            "max_tokens_per_rank": self._spec.config.max_tokens_per_rank,
            "activation_checkpointing": self._spec.config.activation_checkpointing,
            "gpus": self._place.gpus > 0,
            "threads": self._place.threads,
        }

    def start(self) -> None:
        """Start the ranks that are not there. Returns before they are ready."""
        if self._actors:
            return
        args = [(rank, self.num_ranks, self._spec) for rank in range(self.num_ranks)]
        self._actors = self._cluster.start(_WORKER, args, self._place)
        self._held = None

    def bring_to(self, store: Store, history: Sequence[Committed]) -> int:
        """Hold the policy after the updates of ``history``. Returns how many were replayed.

        Raises:
            IntegrityError: a replayed update gives other weights than it committed, the policy's
                or its critic's.
            RetiredError: ``ratchet gc`` removed what the policy would be rebuilt from.
        """
        versions = ["base", *(update.manifest.digest for update in history)]
        if self._held == versions[-1] and self._actors:
            return 0
        first = newest_snapshot(store, history)
        if self._actors and self._held in versions[first:]:
            first = versions.index(self._held)
        else:
            for folder in _replayed_folders(history[first:]):
                refuse_retired(store, folder)
            self._load(store, history, first)
        for update in history[first:]:
            self._replay(store, update)
        return len(history) - first

    def order_of(self, work: Work) -> UpdateOrder:
        """The update that ``work`` describes, to be done with the user's functions as they are."""
        return UpdateOrder(work.inputs, work.identity, work.functions, self._paths())

    def values(
        self, critic: CriticName, store: Store, folder: str, shard: Shard
    ) -> list[np.ndarray]:
        """(T,) float32 for each sample of a rollout shard: what ``critic``, which is the one that
        the next update teaches, gives for the state before each of its tokens.

        They are computed for one shard at a time, so they don't depend on which others are there.
        """
        found: list[np.ndarray] = self._on_all(
            "values", store, folder, shard, critic, self._spec.config
        )
        return found

    def _paths(self) -> dict[str, str]:
        critic = self._spec.config.critic
        model = {} if critic is None else {CRITIC_MODEL: critic.model or self._spec.model}
        return {**self._spec.config.function_paths(), **model}

    def update(self, store: Store, order: UpdateOrder) -> UpdateResult:
        """Do an update on the policy that is held. Call :meth:`hold` once it is committed."""
        self._held = None  # until the commit, no version's name fits
        result: UpdateResult = self._on_all("update", store, order)
        self._has_stock = True
        return result

    def hold(self, update: Committed) -> None:
        """Name what is held now: the policy after ``update``."""
        self._held = update.manifest.digest

    def weights(self) -> Pending:
        """The weights that are held, in the engine's type, to be passed to an engine."""
        if not self._has_stock:
            self._on_all("take_stock")
            self._has_stock = True
        pending = self._actors[0].submit("weights")
        # A rank answers in order: a dead one shows here, where its group is dropped, and not in
        # the engine that gets its weights.
        self._on_all("is_alive")
        return pending

    def distances(self, store: Store, snapshot: Ref) -> dict[str, float]:
        """Largest distance of an entry of each tensor that is held from ``snapshot``'s."""
        found: dict[str, float] = self._on_all("distances", store, snapshot)
        return found

    def save(self, store: Store, folder: str) -> list[Shard]:
        """Write a snapshot of what is held in ``folder``."""
        shards: list[Shard] = self._on_all("save", store, folder)
        return shards

    def drop(self) -> None:
        """End all ranks; the next use starts fresh ones."""
        for actor in self._actors:
            actor.kill()
        self._actors, self._held, self._were_used = [], None, False

    def _load(self, store: Store, history: Sequence[Committed], version: int) -> None:
        if self._were_used:
            self.drop()
        self.start()  # those that were warmed up meanwhile serve
        self._were_used = True
        address = self._actors[0].submit("listen").result()
        self._on_all("join", address)
        if self._spec.config.activation_checkpointing == "auto":
            self._checkpoint(self._takes_checkpointing())
        snapshot = _snapshot_of(store, history[version - 1]) if version else None
        self._on_all("load", store, snapshot, self._spec.config.activation_checkpointing)
        self._held = history[version - 1].manifest.digest if version else "base"
        self._has_stock = False

    def save_memory(self) -> bool:
        """After an update that ran out of memory: make activations again in backward from now on.

        False where that is so already, or not ours to decide.
        """
        if not self._decides_checkpointing or self._spec.config.activation_checkpointing is True:
            return False
        log.warning(
            "update   activation_checkpointing=on reason=a rank ran out of memory without it"
        )
        self.drop()
        self._checkpoint(True)
        return True

    def _takes_checkpointing(self) -> bool:
        """Whether the estimate of a rank's memory fits in its device with it only."""
        has = room_of_rank(self._on_all("total_memory"), self.num_ranks, self._place.gpus)
        need = estimate_of(self._spec, self.num_ranks, checkpoints=False)
        takes = need.total > has
        if takes:
            log.warning(
                "update   activation_checkpointing=on reason=a rank would need %.1f of %.1f GiB",
                need.total / GIB,
                has / GIB,
            )
        return takes

    def _checkpoint(self, checkpoints: bool) -> None:
        config = self._spec.config.model_copy(update={"activation_checkpointing": checkpoints})
        self._spec = replace(self._spec, config=config)

    def _replay(self, store: Store, update: Committed) -> None:
        result = self.update(store, order_of(update.manifest))
        outcome, layout = update.manifest.outcome, layout_of(update.manifest)
        for what, expected, made in (
            ("weights digest", outcome["weights_digest"], result.weights_digest),
            ("critic digest", outcome.get("critic_digest"), result.critic_digest),
        ):
            # Another layout sums in another order: then the last bits may differ, and only then.
            if made != expected and layout == self.layout:
                self.drop()
                raise IntegrityError(update.folder, expected, made, what)
        self.hold(update)

    def _on_all(self, method: str, *args: Any) -> Any:
        """Call every rank; the result is rank 0's. A failure anywhere ends the group: it can't
        be healed, and its state is of no known version."""
        try:
            calls = [actor.submit(method, *args) for actor in self._actors]
            results = self._cluster.gather(calls)
        except Exception:
            self.drop()
            raise
        return results[0]


def order_of(manifest: Manifest) -> UpdateOrder:
    """The update that ``manifest`` records, to be done again."""
    return UpdateOrder(
        manifest.inputs,
        manifest.identity,
        manifest.functions,
        manifest.provenance.get("paths", {}),
    )


def layout_of(manifest: Manifest) -> dict[str, Any]:
    """The layout under which the update of ``manifest`` was made."""
    # An update of an earlier version says no sp: none of its ranks shared a sequence.
    return {"sp": 1, **manifest.provenance.get("layout", {})}


@dataclass(frozen=True)
class PolicyWork(Work):
    """A snapshot of the policy after an update."""

    @property
    def folder(self) -> str:
        return policy_folder(self.iteration, self.key)


def policy_work(update: Committed) -> Work:
    """The description of the snapshot of the policy after ``update``."""
    version = int(update.manifest.outcome["policy_version"])
    outcome = update.manifest.outcome
    digests = {n: outcome[n] for n in ("weights_digest", "critic_digest") if n in outcome}
    inputs = {"update": update.ref}
    return PolicyWork("policy", "policy", SNAPSHOT_VERSION, version, digests, inputs)


def newest_snapshot(store: Store, history: Sequence[Committed]) -> int:
    """Latest version in ``history`` whose snapshot can be read; 0 is the base model.

    One that has lost a file is passed over, and the log says so: an older one and the updates
    after it give the same policy.
    """
    kept = {int(name) for name in store.names("policy") if name.isdecimal()}
    for version in sorted(kept & set(range(1, len(history) + 1)), reverse=True):
        if _has_snapshot(store, history[version - 1]):
            return version
    return 0


def is_rebuildable(store: Store, history: Sequence[Committed]) -> bool:
    """Whether all is there that the policy after ``history`` is rebuilt from."""
    for update in reversed(history):
        if _has_snapshot(store, update):
            return True
        if any(is_retired(store, folder) for folder in _replayed_folders([update])):
            return False
    return True


def _has_snapshot(store: Store, update: Committed) -> bool:
    work = policy_work(update)
    names = store.names(work.folder)
    if FILE_NAME not in names or TOMBSTONE in names:
        return False
    try:
        return find(store, work) is not None
    except IntegrityError as error:
        log.warning("update   policy=%d passed_over=%s", work.iteration, error)
        return False


def _replayed_folders(updates: Sequence[Committed]) -> list[str]:
    return [folder for update in updates for folder in sorted(read_folders(update.manifest.inputs))]


def _snapshot_of(store: Store, update: Committed) -> Ref:
    folder = policy_work(update).folder
    return Ref(folder, read_manifest(store, folder).digest)
