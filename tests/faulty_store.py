"""A store that fails at its n-th operation, and only there."""

import contextlib
import errno
import functools
import resource
from collections.abc import Callable, Iterator
from typing import Any

from artifacts.errors import StoreError
from artifacts.store import Store

ERROR = "the operation fails, and does nothing"
LOST_REPLY = "the operation is done, and fails"
CUT_ANSWER = "what is read or listed is half of what is there"
FULL_DISK = "the kernel stops the write half way"
FAULTS = (ERROR, LOST_REPLY, CUT_ANSWER, FULL_DISK)

_WRITES = {"put", "put_named", "create", "remove"}
_NO_OPERATIONS = {"locate", "guard", "is_exclusive"}
_OPERATIONS = [
    name
    for name, value in vars(Store).items()
    if callable(value) and not name.startswith("_") and name not in _NO_OPERATIONS
]


class FaultyStore(Store):
    """Fails in the way ``fault`` at operation ``at``, counted from 1. 0: never."""

    def __init__(self, url: str, fault: str, at: int) -> None:
        super().__init__(url)
        self.fault, self.at = fault, at
        self.calls: list[str] = []
        self._depth = 0
        self.files_at_fault: dict[str, bytes] = {}

    @property
    def has_failed(self) -> bool:
        """Whether the operation that fails has come."""
        return 0 < self.at <= len(self.calls)

    def places(self) -> list[int]:
        """The operations so far, counted from 1, at which the fault differs from a plain error."""
        kinds = {ERROR: set(self.calls), CUT_ANSWER: set(self.calls) - _WRITES}
        wanted = kinds.get(self.fault, _WRITES)
        return [at for at, name in enumerate(self.calls, start=1) if name in wanted]

    def _call(self, name: str, operation: Callable[..., Any], *args: Any) -> Any:
        if self._depth == 0:  # one that serves another is part of it
            self.calls.append(name)
        if self._depth or len(self.calls) != self.at:
            with self._deeper():
                return operation(*args)
        self.files_at_fault = files(self)
        with self._deeper():
            return self._fail(name, operation, *args)

    @contextlib.contextmanager
    def _deeper(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _fail(self, name: str, operation: Callable[..., Any], *args: Any) -> Any:
        if self.fault == ERROR:
            raise StoreError(name, f"{self.url}/{args[0]}", "on purpose", errno.EIO)
        if self.fault == LOST_REPLY:
            operation(*args)
            raise StoreError(name, f"{self.url}/{args[0]}", "on purpose", errno.ETIMEDOUT)
        if self.fault == FULL_DISK:
            with no_room_above(8):
                return operation(*args)
        return _half(operation(*args))


def _operation(name: str) -> Callable[..., Any]:
    plain = getattr(Store, name)

    @functools.wraps(plain)
    def call(self: FaultyStore, *args: Any) -> Any:
        return self._call(name, functools.partial(plain, self), *args)

    return call


for _name in _OPERATIONS:
    setattr(FaultyStore, _name, _operation(_name))


def _half(answer: Any) -> Any:
    if isinstance(answer, bytes | list | memoryview):
        return answer[: len(answer) // 2]
    if isinstance(answer, dict):
        return dict(list(answer.items())[: len(answer) // 2])
    return answer


@contextlib.contextmanager
def no_room_above(num_bytes: int) -> Iterator[None]:
    """No file of this process can grow past ``num_bytes``: the kernel says EFBIG half way.

    Nearest to a full disk that can be had without a disk of one's own.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files(store: Store) -> dict[str, bytes]:
    """Every file that lies in ``store``, hidden ones too, with its bytes."""
    root = f"{store.root}/"
    found = store.fs.find(root) if store.fs.exists(store.root) else []
    # SeaweedFS shows a folder that was emptied as an object.
    inside = [str(path) for path in found if str(path).startswith(root) and str(path) != root]
    return {path.removeprefix(root): store.fs.cat_file(path) for path in inside}
