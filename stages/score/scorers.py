"""The driver's side of the score stage: its workers, and what they are given from elsewhere."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from artifacts.manifests import Shard
from artifacts.store import Store
from stages.score.crew import Crew
from stages.score.order import Finished, ShardOrder
from stages.score.reward_model_spec import RewardModelJob, RewardModelSpec
from stages.score.worker import ScorerSpec
from stages.workers import Cluster, Placement

_WORKER = "stages.score.worker:ScoreWorker"
_REWARD_MODEL_WORKER = "stages.score.reward_model_worker:RewardModelWorker"

# A critic: rollout folder and shard to (T,) float32 for each sample, the value of the state before
# each of its tokens. Whoever holds its weights computes them; the score workers write them down.
Values = Callable[[Store, str, Shard], Sequence[np.ndarray]]


class RewardModels:
    """Workers of each reward model, kept for the run: one set, whoever asks it."""

    def __init__(self, cluster: Cluster, workers: int, place: Placement) -> None:
        self._cluster, self._workers, self._place = cluster, workers, place
        self._crews: dict[RewardModelJob, Crew] = {}

    def crew(self, job: RewardModelJob) -> Crew:
        """The workers that do ``job``, not started yet where nobody has asked for them."""
        if job not in self._crews:
            names = [f"{job.spec.column}-{number}" for number in range(self._workers)]
            made = Crew(self._cluster, _REWARD_MODEL_WORKER, names, job, self._place)
            self._crews[job] = made
        return self._crews[job]


class Scorers:
    """A pool of score workers, and the workers of its reward models; kept for the run.

    Without ``models``, reward models get one worker each.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: ScorerSpec,
        place: Placement,
        retries: int = 0,
        models: RewardModels | None = None,
    ) -> None:
        self._retries = retries
        names = [f"scorer-{number}" for number in range(spec.workers)]
        self._crew = Crew(cluster, _WORKER, names, spec, place)
        models = models or RewardModels(cluster, 1, Placement())
        self._models = {
            reward.column: models.crew(RewardModelJob(reward, spec.digests.get(reward.column)))
            for reward in spec.rewards
            if isinstance(reward, RewardModelSpec)
        }

    def start(self) -> None:
        """Start the workers that are not there. Returns before they are ready."""
        for crew in (*self._models.values(), self._crew):
            crew.start()

    def score(
        self,
        store: Store,
        source: str,
        folder: str,
        orders: Sequence[ShardOrder],
        critic: Values | None = None,
    ) -> Iterator[Finished]:
        """Score ``orders`` of ``source`` into ``folder``; yields each as it is written.

        Reward models go from shard to shard while those that they have read are scored;
        ``critic`` is asked for a shard's values as its scoring begins. A worker that dies is
        replaced, and its shard begun again.

        Raises:
            StageError: workers died on one shard more often than is allowed, or a reward model
                can't be loaded.
        """
        self.start()
        given: Iterable[ShardOrder] = orders
        for column in self._models:
            given = self._rated(column, store, source, given)
        if critic is not None:
            given = _valued(critic, store, source, given)
        return self._crew.score((store, source, folder), given, self._retries)

    def drop(self) -> None:
        """End all workers; the next use starts fresh ones."""
        for crew in (*self._models.values(), self._crew):
            crew.drop()

    def _rated(
        self, column: str, store: Store, source: str, orders: Iterable[ShardOrder]
    ) -> Iterator[ShardOrder]:
        """``orders`` with what a reward model gives, as it has read each."""
        seen: dict[int, ShardOrder] = {}

        def taken() -> Iterator[ShardOrder]:
            for order in orders:
                seen[order.index] = order
                yield order

        for event in self._models[column].score((store, source), taken(), self._retries):
            order = seen.pop(event.index)
            rated = {**order.rated, column: event.outcomes}
            yield replace(order, rated=rated, read=[*order.read, event.entry])


def _valued(
    critic: Values, store: Store, source: str, orders: Iterable[ShardOrder]
) -> Iterator[ShardOrder]:
    for order in orders:
        yield replace(order, values=critic(store, source, order.rollout))
