"""The driver's side of the score stage: its workers, and what they are given from elsewhere."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from artifacts.manifests import Shard
from artifacts.store import Store
from stages.score.crew import Crew
from stages.score.order import Finished, ShardOrder
from stages.score.worker import ScorerSpec
from stages.workers import Cluster, Placement

_WORKER = "stages.score.worker:ScoreWorker"

# A critic: rollout folder and shard to (T,) float32 for each sample, the value of the state before
# each of its tokens. Whoever holds its weights computes them; the score workers write them down.
Values = Callable[[Store, str, Shard], Sequence[np.ndarray]]


class Scorers:
    """A pool of score workers, kept for the run."""

    def __init__(
        self, cluster: Cluster, spec: ScorerSpec, place: Placement, retries: int = 0
    ) -> None:
        self._retries = retries
        names = [f"scorer-{number}" for number in range(spec.workers)]
        self._crew = Crew(cluster, _WORKER, names, spec, place)

    def start(self) -> None:
        """Start the workers that are not there. Returns before they are ready."""
        self._crew.start()

    def score(
        self,
        store: Store,
        source: str,
        folder: str,
        orders: Sequence[ShardOrder],
        critic: Values | None = None,
    ) -> Iterator[Finished]:
        """Score ``orders`` of ``source`` into ``folder``; yields each as it is written.

        ``critic`` is asked for a shard's values as its scoring begins. A worker that dies is
        replaced, and its shard begun again.

        Raises:
            StageError: workers died on one shard more often than is allowed.
        """
        given = orders if critic is None else _valued(critic, store, source, orders)
        return self._crew.score((store, source, folder), given, self._retries)

    def drop(self) -> None:
        """End all workers; the next use starts fresh ones."""
        self._crew.drop()


def _valued(
    critic: Values, store: Store, source: str, orders: Iterable[ShardOrder]
) -> Iterator[ShardOrder]:
    for order in orders:
        yield replace(order, values=critic(store, source, order.rollout))
