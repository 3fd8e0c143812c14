"""The driver's side of the rollout workers: start them, give them weights, share out shards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from artifacts.store import Store
from stages.rollout.config import RolloutConfig
from stages.rollout.worker import Finished, PolicyName, Sample, ShardOrder
from stages.workers import Actor, Cluster, Pending, Placement, dropping_the_dead

_WORKER = "stages.rollout.worker:RolloutWorker"


class Engines:
    """Warm engines, started at once and kept for the run."""

    def __init__(
        self,
        cluster: Cluster,
        model: str,
        base: PolicyName,
        config: RolloutConfig,
        context: int,
        count: int,
        place: Placement,
    ) -> None:
        self._cluster = cluster
        self._place = place
        self._args = [(f"engine-{n}", model, base, config, context) for n in range(count)]
        self._base = base
        self._actors: list[Actor] = []
        self._held: PolicyName | None = None

    def start(self) -> None:
        """Start the engines that are not there. Returns before they are ready."""
        if not self._actors:
            self._actors = self._cluster.start(_WORKER, self._args, self._place)
            self._held = self._base

    def holds(self, policy: PolicyName) -> bool:
        """Whether the engines sample with ``policy`` already."""
        return self._held == policy

    def load(self, policy: PolicyName, weights: Pending) -> float:
        """Give the engines the weights of ``policy``. Returns the longest hand-over, seconds."""
        self.start()
        with dropping_the_dead(self):
            loads = [actor.submit("load", policy, weights) for actor in self._actors]
            seconds = max(self._cluster.gather(loads))
        self._held = policy
        return float(seconds)

    def generate(
        self,
        store: Store,
        folder: str,
        policy: PolicyName,
        orders: Sequence[ShardOrder],
        sampling: RolloutConfig | None = None,
    ) -> Iterator[Sample | Finished]:
        """Sample ``orders`` on all engines; yields progress as it comes.

        ``sampling``: how, where that is not as the engines were made.
        """
        self.start()
        shares = [orders[n :: len(self._actors)] for n in range(len(self._actors))]
        streams = [
            actor.stream("generate", store, folder, policy, share, sampling)
            for actor, share in zip(self._actors, shares, strict=True)
        ]
        with dropping_the_dead(self):
            yield from self._cluster.merge(streams)

    def drop(self) -> None:
        """End all engines; the next use starts fresh ones."""
        for actor in self._actors:
            actor.kill()
        self._actors, self._held = [], None


@dataclass(frozen=True)
class SamplingOtherwise:
    """Engines, asked to sample in another way than the training does."""

    engines: Engines
    sampling: RolloutConfig

    def generate(
        self, store: Store, folder: str, policy: PolicyName, orders: Sequence[ShardOrder]
    ) -> Iterator[Sample | Finished]:
        """See :meth:`Engines.generate`."""
        return self.engines.generate(store, folder, policy, orders, self.sampling)
