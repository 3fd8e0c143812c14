"""Workers of one kind that share out shards: who is at which, and what if one dies."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stages.contract import StageError
from stages.score.order import InHand, ShardOrder
from stages.workers import (
    ENDED,
    Actor,
    Cluster,
    Placement,
    Stream,
    WorkerDiedError,
    dropping_the_dead,
)


@dataclass
class _Underway:
    """A shard that a worker is at, and the sample that it last had in hand."""

    stream: Stream
    order: ShardOrder
    number: int
    sample: str | None = None


class Crew:
    """Actors of class ``worker`` (``module:Class``), kept for the run.

    Each is made of its name and ``spec``, and has a method ``score(*where, order)`` that yields
    what a shard gives, and :class:`InHand` from the second attempt on.
    """

    def __init__(
        self, cluster: Cluster, worker: str, names: Sequence[str], spec: Any, place: Placement
    ) -> None:
        self._cluster, self._worker, self._place = cluster, worker, place
        self._names, self._spec = names, spec
        self._actors: list[Actor] = []

    def start(self) -> None:
        """Start the workers that are not there. Returns before they are ready."""
        if not self._actors:
            arguments = [(name, self._spec) for name in self._names]
            self._actors = self._cluster.start(self._worker, arguments, self._place)

    def score(
        self, where: Sequence[Any], orders: Iterable[ShardOrder], retries: int
    ) -> Iterator[Any]:
        """What the workers yield for ``orders``, each of which is taken when a worker is free.

        A worker that dies is replaced, and its shard begun again, ``retries`` times.

        Raises:
            StageError: workers died on one shard more often than that.
        """
        self.start()
        again, fresh, busy = deque[ShardOrder](), iter(orders), list[_Underway]()
        idle = deque(range(len(self._actors)))
        with dropping_the_dead(self):
            while True:
                while idle and (order := again.popleft() if again else next(fresh, None)):
                    busy.append(self._begin(idle.popleft(), where, order))
                if not busy:
                    return
                try:
                    place, event = self._cluster.next_of([one.stream for one in busy])
                except WorkerDiedError as error:
                    if error.place is None:
                        raise
                    dead = busy.pop(error.place)
                    again.append(self._again(dead, error, retries))
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

    def _begin(self, number: int, where: Sequence[Any], order: ShardOrder) -> _Underway:
        call = self._actors[number].stream
        return _Underway(call("score", *where, order, in_step=order.attempt > 1), order, number)

    def _replace(self, number: int) -> None:
        self._actors[number].kill()
        arguments = [(self._names[number], self._spec)]
        (self._actors[number],) = self._cluster.start(self._worker, arguments, self._place)

    def _again(self, dead: _Underway, error: WorkerDiedError, retries: int) -> ShardOrder:
        """The order for the next attempt; from the second on, workers say what is in hand."""
        order = dead.order
        if order.attempt > retries:
            self.drop()
            raise StageError(
                f"score worker {self._names[dead.number]} died on shard {order.index}, as did "
                f"{order.attempt - 1} before it (score.retries is {retries}); "
                + _circumstances(dead, error)
            ) from error
        return replace(order, attempt=order.attempt + 1)


def _circumstances(dead: _Underway, error: WorkerDiedError) -> str:
    if dead.sample is not None:
        return f"the sample in hand was {dead.sample}"
    last = str(error).strip().splitlines()[-1]
    return f"no reward had begun, or score.retries is 0: {last}"
