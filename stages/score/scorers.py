"""The driver's side of the score workers."""

from collections.abc import Iterator, Sequence

from artifacts.manifests import Shard
from artifacts.store import Store
from stages.score.config import RewardSpec
from stages.score.worker import Finished, ReferenceSpec
from stages.workers import Actor, Cluster, Placement, dropping_the_dead

_WORKER = "stages.score.worker:ScoreWorker"


class Scorers:
    """A pool of score workers, kept for the run."""

    def __init__(
        self,
        cluster: Cluster,
        specs: Sequence[RewardSpec],
        reference: ReferenceSpec | None,
        count: int,
        place: Placement,
    ) -> None:
        self._cluster = cluster
        self._args = [(f"scorer-{n}", list(specs), reference) for n in range(count)]
        self._place = place
        self._actors: list[Actor] = []

    def start(self) -> None:
        """Start the workers that are not there. Returns before they are ready."""
        if not self._actors:
            self._actors = self._cluster.start(_WORKER, self._args, self._place)

    def score(
        self, store: Store, source: str, folder: str, shards: Sequence[tuple[int, Shard]]
    ) -> Iterator[Finished]:
        """Score ``shards`` of ``source`` into ``folder``; yields each as it is committed."""
        self.start()
        streams = [
            actor.stream("score", store, source, folder, shards[n :: len(self._actors)])
            for n, actor in enumerate(self._actors)
        ]
        with dropping_the_dead(self):
            yield from self._cluster.merge(streams)

    def drop(self) -> None:
        """End all workers; the next use starts fresh ones."""
        for actor in self._actors:
            actor.kill()
        self._actors = []
