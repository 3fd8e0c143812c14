"""The driver's side of the score workers: who scores which shard, and what if one dies."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from artifacts.manifests import Shard
from artifacts.store import Store
from stages.contract import StageError
from stages.score.worker import Finished, InHand, ScorerSpec, ShardOrder
from stages.workers import (
    ENDED,
    Actor,
    Cluster,
    Placement,
    Stream,
    WorkerDiedError,
    dropping_the_dead,
)

_WORKER = "stages.score.worker:ScoreWorker"

# A critic: rollout folder and shard to (T,) float32 for each sample, the value of the state before
# each of its tokens. Whoever holds its weights computes them; the score workers write them down.
Values = Callable[[Store, str, Shard], Sequence[np.ndarray]]


@dataclass
class _Underway:
    """A shard that a worker is at, and the sample that it last had in hand."""

    stream: Stream
    order: ShardOrder
    number: int
    sample: str | None = None


class Scorers:
    """A pool of score workers, kept for the run."""

    def __init__(
        self, cluster: Cluster, spec: ScorerSpec, place: Placement, retries: int = 0
    ) -> None:
        self._cluster, self._spec, self._place = cluster, spec, place
        self._retries = retries
        self._actors: list[Actor] = []

    def start(self) -> None:
        """Start the workers that are not there. Returns before they are ready."""
        if not self._actors:
            arguments = [self._arguments(n) for n in range(self._spec.workers)]
            self._actors = self._cluster.start(_WORKER, arguments, self._place)

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
        self.start()
        waiting, busy = deque(orders), list[_Underway]()
        idle = deque(range(len(self._actors)))
        with dropping_the_dead(self):
            while waiting or busy:
                while waiting and idle:
                    number, order = idle.popleft(), waiting.popleft()
                    if critic is not None and order.values is None:
                        values = critic(store, source, order.rollout)
                        order = replace(order, values=values)
                    busy.append(self._begin(number, store, source, folder, order))
                try:
                    place, event = self._cluster.next_of([one.stream for one in busy])
                except WorkerDiedError as error:
                    if error.place is None:
                        raise
                    dead = busy.pop(error.place)
                    waiting.appendleft(self._again(dead, error))
                    self._replace(dead.number)
                    idle.append(dead.number)
                    continue
                if event is ENDED:
                    idle.append(busy.pop(place).number)
                elif isinstance(event, InHand):
                    busy[place].sample = event.sample
                else:
                    yield event

    def drop(self) -> None:
        """End all workers; the next use starts fresh ones."""
        for actor in self._actors:
            actor.kill()
        self._actors = []

    def _begin(
        self, number: int, store: Store, source: str, folder: str, order: ShardOrder
    ) -> _Underway:
        call = self._actors[number].stream
        in_step = order.attempt > 1
        return _Underway(
            call("score", store, source, folder, order, in_step=in_step), order, number
        )

    def _arguments(self, number: int) -> tuple[str, ScorerSpec]:
        return f"scorer-{number}", self._spec

    def _replace(self, number: int) -> None:
        self._actors[number].kill()
        (self._actors[number],) = self._cluster.start(
            _WORKER, [self._arguments(number)], self._place
        )

    def _again(self, dead: _Underway, error: WorkerDiedError) -> ShardOrder:
        """The order for the next attempt; from the second on, workers say what is in hand."""
        order = dead.order
        if order.attempt > self._retries:
            self.drop()
            raise StageError(
                f"score worker scorer-{dead.number} died on shard {order.index}, as did "
                f"{order.attempt - 1} before it (score.retries is {self._retries}); "
                + _circumstances(dead, error)
            ) from error
        return replace(order, attempt=order.attempt + 1)


def _circumstances(dead: _Underway, error: WorkerDiedError) -> str:
    if dead.sample is not None:
        return f"the sample in hand was {dead.sample}"
    last = str(error).strip().splitlines()[-1]
    return f"no reward had begun, or score.retries is 0: {last}"
