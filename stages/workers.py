"""Long-lived workers behind one small interface, in this process or elsewhere.

A stage asks a :class:`Cluster` for actors and calls their methods. ``LocalCluster`` keeps them in
the driver's own process, so a breakpoint in a reward or a loss just works; ``RayCluster``
(``stages/ray_cluster.py``) gives each a process of its own.
"""

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Placement:
    """Where actors run: environment and devices of each."""

    gpus: float = 0.0
    threads: int = 1
    env: dict[str, str] = field(default_factory=dict)


class Pending(Protocol):
    """A result to come. May be passed as an argument of another actor's call."""

    def result(self) -> Any:
        """The value, or the exception that the call raised."""


class Actor(Protocol):
    """A worker's handle."""

    def submit(self, method: str, *args: Any) -> Pending:
        """Call ``method`` and go on."""

    def stream(self, method: str, *args: Any, in_step: bool = False) -> "Stream":
        """Call a method that yields, and go on.

        ``in_step``: it waits at each yield until the value has been taken, so that none is lost
        if it dies right after.
        """

    def kill(self) -> None:
        """End it, without asking."""


class Stream(Protocol):
    """What a yielding call has yielded so far."""

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...


class Cluster(Protocol):
    """Where actors live."""

    is_local: bool

    def start(self, worker: str, args: Sequence[tuple[Any, ...]], place: Placement) -> list[Actor]:
        """One actor of class ``worker`` (``module:Class``) for each tuple of its arguments.

        By name, so that the driver imports none of what its workers do.
        """

    def gather(self, calls: Sequence[Pending]) -> list[Any]:
        """The calls' values, in order. Raises as soon as one of them fails: the others may be
        waiting for it, as ranks do that meet in a collective."""

    def merge(self, streams: Sequence[Stream]) -> Iterator[Any]:
        """What the streams yield, in the order in which it comes."""

    def next_of(self, streams: Sequence[Stream]) -> tuple[int, Any]:
        """The place of a stream that has yielded, and what; ENDED where it is through.

        Raises:
            WorkerDiedError: with the place of the stream whose worker it was.
        """

    def shutdown(self) -> None:
        """End all actors."""


# What a stream gives when it is through.
ENDED = object()


class WorkerDiedError(RuntimeError):
    """An actor's process ended under a call. Start another, and repeat what was not committed.

    ``place`` is that of its stream, where several were waited for.
    """

    place: int | None = None


class Pool(Protocol):
    """Actors of one kind, started on first use."""

    def drop(self) -> None:
        """End them all; the next use starts fresh ones."""


@contextmanager
def dropping_the_dead(pool: Pool) -> Iterator[None]:
    """Drop ``pool`` when a worker of it dies, so that a retry starts whole and makes the rest."""
    try:
        yield
    except WorkerDiedError:
        pool.drop()
        raise


@dataclass(frozen=True)
class Done:
    """A result that is there already."""

    value: Any = None
    error: Exception | None = None

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class LocalActor:
    """An object in this process, called at once."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance

    def submit(self, method: str, *args: Any) -> Done:
        try:
            return Done(getattr(self._instance, method)(*_values(args)))
        except Exception as error:
            return Done(error=error)

    def stream(self, method: str, *args: Any, in_step: bool = False) -> Iterator[Any]:
        return iter(getattr(self._instance, method)(*_values(args)))

    def kill(self) -> None:
        self._instance = None


class LocalCluster:
    """All actors in this process. One rank or engine a kind: there is nothing to run beside."""

    is_local = True

    def start(self, worker: str, args: Sequence[tuple[Any, ...]], place: Placement) -> list[Actor]:
        os.environ.update(place.env)
        cls = worker_class(worker)
        return [LocalActor(cls(*_values(arguments))) for arguments in args]

    def gather(self, calls: Sequence[Pending]) -> list[Any]:
        return [call.result() for call in calls]

    def merge(self, streams: Sequence[Stream]) -> Iterator[Any]:
        for stream in streams:
            yield from stream

    def next_of(self, streams: Sequence[Stream]) -> tuple[int, Any]:
        return 0, next(streams[0], ENDED)

    def shutdown(self) -> None:
        """Nothing to end: the objects go with the process."""


def worker_class(worker: str) -> Any:
    """The class at ``module:Class``."""
    module, name = worker.split(":")
    return getattr(importlib.import_module(module), name)


def _values(args: Sequence[Any]) -> list[Any]:
    return [arg.result() if isinstance(arg, Done) else arg for arg in args]
