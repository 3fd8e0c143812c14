"""The door to Ray: actors in processes of their own, on a local Ray or an existing cluster."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from stages.workers import (
    ENDED,
    Actor,
    Done,
    Pending,
    Placement,
    Stream,
    WorkerDiedError,
    worker_class,
)

# Ray's own floor is 75 MB; weights travel through it once an iteration.
_STORE_FLOOR = 256 << 20


class Host:
    """What runs in an actor process: sets its environment, then imports and makes the worker.

    Setting it here and not by a ``runtime_env`` lets an actor take a process that Ray has started
    already, and still comes before torch or vLLM read it.
    """

    def __init__(self, worker: str, env: dict[str, str], *args: Any) -> None:
        os.environ.update(env)
        self._worker = worker_class(worker)(*args)

    def call(self, method: str, *args: Any) -> Any:
        """Call the worker's ``method``."""
        return getattr(self._worker, method)(*args)

    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        """What the worker's ``method`` yields."""
        yield from getattr(self._worker, method)(*args)


class RayPending:
    """An object reference. Passed on to another actor it arrives there as its value."""

    def __init__(self, ref: ray.ObjectRef) -> None:
        self.ref = ref

    def result(self) -> Any:
        return _get(self.ref)


class RayStream:
    """The references that a yielding call gives, one a value."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return _get(next(self.generator))


class RayActor:
    """A handle of one actor process."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def submit(self, method: str, *args: Any) -> RayPending:
        return RayPending(self._handle.call.remote(method, *_refs(args)))

    def stream(self, method: str, *args: Any, in_step: bool = False) -> RayStream:
        options = {"_generator_backpressure_num_objects": 1} if in_step else {}
        call = self._handle.stream.options(num_returns="streaming", **options)
        return RayStream(call.remote(method, *_refs(args)))

    def kill(self) -> None:
        ray.kill(self._handle)


class RayCluster:
    """Ray, started here unless ``address`` names a cluster that runs already."""

    is_local = False

    def __init__(self, address: str | None, object_store_bytes: int = 0) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if address is None:
            options |= {
                "include_dashboard": False,
                "object_store_memory": max(_STORE_FLOOR, object_store_bytes),
            }
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(address=address or "local", **options)
        if threading.current_thread() is threading.main_thread():
            # Ray puts its own in place, which exits under our feet.
            signal.signal(signal.SIGTERM, handler)

    def start(self, worker: str, args: Sequence[tuple[Any, ...]], place: Placement) -> list[Actor]:
        env = {"OMP_NUM_THREADS": str(place.threads), **place.env}
        # CPUs are bookkeeping only in Ray, and threads are set by env: ask for none, so that
        # engines and ranks that take turns fit on a small machine. The name is for `ps`.
        remote = ray.remote(type(worker.split(":")[1], (Host,), {})).options(
            num_cpus=0, num_gpus=place.gpus, max_restarts=0
        )
        return [RayActor(remote.remote(worker, env, *_refs(arguments))) for arguments in args]

    def gather(self, calls: Sequence[Pending]) -> list[Any]:
        refs = [call.ref for call in calls if isinstance(call, RayPending)]
        waiting = refs
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1)
            _get(ready[0])
        return [_get(ref) for ref in refs]

    def merge(self, streams: Sequence[Stream]) -> Iterator[Any]:
        waiting = list(streams)
        while waiting:
            place, value = self.next_of(waiting)
            if value is ENDED:
                del waiting[place]
            else:
                yield value

    def next_of(self, streams: Sequence[Stream]) -> tuple[int, Any]:
        generators = [stream.generator for stream in streams if isinstance(stream, RayStream)]
        ready, _ = ray.wait(generators, num_returns=1)
        place = generators.index(ready[0])
        try:
            return place, next(streams[place], ENDED)
        except WorkerDiedError as error:
            error.place = place
            raise

    def shutdown(self) -> None:
        ray.shutdown()


def _refs(args: Sequence[Any]) -> list[Any]:
    return [_ref(arg) for arg in args]


def _ref(arg: Any) -> Any:
    if isinstance(arg, RayPending):
        return arg.ref
    return arg.result() if isinstance(arg, Done) else arg


def _get(ref: ray.ObjectRef) -> Any:
    try:
        return ray.get(ref)
    except RayActorError as error:
        raise WorkerDiedError(f"a worker process ended: {error}") from error
    except RayTaskError as error:
        # The worker's own exception: caught by its class, and read without where it was raised.
        raise error.cause from error
