"""One writer per run: a lease that is taken by exclusive creation and kept alive by a heartbeat.

    <store>/<run>/lease/
      000001.json       who held the run first, released or not
      000002.json       the highest token owns the run, and rewrites its record at every beat

Who owns the run is never read off a clock. A record that was released is free, and so is one whose
process is certain to have ended, as seen from its own host. Any other is watched for one time to
live, measured by the watcher alone: if its beat moves, the run is held; if not, the next token is
taken. The times in a record are for people.

That alone would let a writer that was paused (stopped, swapped out, cut off from the store) wake
up and write beside its successor. So every commit asks first whether a higher token exists: see
:meth:`Lease.check`. A writer that was paused and that nobody overtook goes on as if nothing had
been.

A beat says that the process lives, not that its work moves on.
"""

import contextlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from artifacts.errors import AlreadyExistsError, HeldError, IntegrityError, LeaseLostError
from artifacts.processes import Process, has_ended, this_process
from artifacts.store import Store

FOLDER = "lease"
# A live holder's beat moves well within the time that a watcher grants it.
_BEATS_PER_TTL, _LOOKS_PER_TTL = 3, 12
_NAME = re.compile(r"(\d+)\.json")

log = logging.getLogger("ratchet.lease")


@dataclass(frozen=True)
class Record:
    """What a lease's file says.

    Attributes:
        token: the file's number; the highest one owns the run.
        owner: unique to this taking of the lease.
        host: name of the holder's host, for people.
        process: the holder.
        since: when it was taken, ISO 8601, UTC by the holder's clock; for people.
        ttl_seconds: how long the beat may stand still before another may take over.
        beat: grows as long as the holder lives.
        released: whether the holder has let go.
    """

    token: int
    owner: str
    host: str
    process: Process
    since: str
    ttl_seconds: float
    beat: int = 0
    released: bool = False

    @property
    def path(self) -> str:
        """Where the record lies in the run."""
        return f"{FOLDER}/{self.token:06d}.json"

    def to_json(self) -> bytes:
        """The file's bytes."""
        return json.dumps(asdict(self), sort_keys=True, indent=1).encode()


class Lease:
    """The right to write in a run, kept alive by a thread. Made by :func:`hold`."""

    def __init__(self, store: Store, record: Record) -> None:
        self.store, self.record = store, record
        self._is_ending = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._keep_alive, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Refuse where the run is another's by now. Asks the store, and no clock.

        Between this check and the commit that follows it, the run may still be taken over. What
        is committed in that window does no harm: a manifest is created exclusively, in a folder
        named by the key of all that determines its content, over files that are whole and named
        by their digests. Either the successor finds it and uses it, as it does what was committed
        before it came, or the successor was first, and then the late one is refused or equal.

        A heartbeat that failed is no loss by itself, as the store may have been away for
        everybody: it is logged when it happens, and becomes this error's cause if it led to one.

        Raises:
            LeaseLostError: a higher token exists, or this one's record was removed.
        """
        newest = read_newest(self.store)
        if newest is None or newest.token < self.record.token:
            raise LeaseLostError(self.store.url, "has lost its lease's record") from self._failure
        if newest.owner != self.record.owner:
            what = f"was taken over by process {newest.process.pid} on {newest.host}"
            raise LeaseLostError(self.store.url, f"{what} at {newest.since}") from self._failure

    @contextlib.contextmanager
    def guarding(self, store: Store) -> Iterator[None]:
        """Check before every commit that is made through ``store``."""
        before, store.guard = store.guard, self.check
        try:
            yield
        finally:
            store.guard = before

    def release(self) -> None:
        """Let go, so that the next writer need not wait. Where that fails, it has to."""
        self._is_ending.set()
        self._thread.join(self.record.ttl_seconds)
        try:
            self._write(released=True)
        except Exception as error:
            # The work is done and committed; what it ended with matters more than this.
            log.warning("lease    released=failed error=%r", error)

    def _keep_alive(self) -> None:
        while not self._is_ending.wait(self.record.ttl_seconds / _BEATS_PER_TTL):
            try:
                self._write()
                self._failure = None
            except Exception as error:
                if self._failure is None:
                    log.warning("lease    beat=failed error=%r", error)
                self._failure = error

    def _write(self, released: bool = False) -> None:
        self.record = replace(self.record, beat=self.record.beat + 1, released=released)
        self.store.put(self.record.path, self.record.to_json())


@contextlib.contextmanager
def hold(
    store: Store, ttl_seconds: float, on_wait: Callable[[Record], None] | None = None
) -> Iterator[Lease]:
    """Own the run while inside: every commit through ``store`` is checked, others are kept out.

    Args:
        ttl_seconds: how long this process may be silent before another may take over.
        on_wait: called with the record of a holder that has to be watched, when that begins.

    Raises:
        HeldError: another process holds the run, and lives.
        OSError: the store can't be written, or doesn't show what is written.
    """
    lease = Lease(store, _take(store, ttl_seconds, on_wait))
    try:
        with lease.guarding(store):
            yield lease
    finally:
        lease.release()


def read_newest(store: Store) -> Record | None:
    """The record that owns the run, or None where nobody ever held it."""
    names = (_NAME.fullmatch(name) for name in store.names(FOLDER))
    found = max((match for match in names if match), key=lambda m: int(m[1]), default=None)
    if found is None:
        return None
    path = f"{FOLDER}/{found[0]}"
    data = store.read(path)
    try:
        values: dict[str, Any] = json.loads(data)
        return Record(**{**values, "process": Process(**values["process"])})
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(path, "a lease", f"{error!r} on reading it", "content") from error


def _take(store: Store, ttl_seconds: float, on_wait: Callable[[Record], None] | None) -> Record:
    owner = uuid4().hex
    watched: Record | None = None
    tried, since = 0, 0.0
    while True:
        # Stands still while the machine sleeps, as the heartbeat of a holder on it does: a clock
        # that ran on would take a run from under a holder that wakes up a moment later.
        now = time.monotonic()
        found = read_newest(store)
        if found is not None and found.owner == owner:
            return found
        if (found.token if found else 0) < tried:
            raise OSError(f"{store.url}/{FOLDER}: lease {tried} was created, and can't be found")
        if found is None or found.released or has_ended(found.process):
            tried = _create_next(store, found, owner, ttl_seconds)
            continue
        if watched is None or watched.owner != found.owner:
            watched, since = found, now
            if on_wait is not None:
                on_wait(found)
        elif found.beat != watched.beat:
            raise HeldError(store.url, found.host, found.process.pid, found.since)
        elif now - since >= found.ttl_seconds:
            tried = _create_next(store, found, owner, ttl_seconds)
            continue
        time.sleep(found.ttl_seconds / _LOOKS_PER_TTL)


def _create_next(store: Store, last: Record | None, owner: str, ttl_seconds: float) -> int:
    """Try to create the record after ``last``; returns its token, whoever created it."""
    # Who has won is seen by reading: a reply may be lost after the record was made, and on a store
    # that overwrites, both of two rivals are told that they created it.
    record = Record(
        token=1 if last is None else last.token + 1,
        owner=owner,
        host=socket.gethostname(),
        process=this_process(),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
        ttl_seconds=ttl_seconds,
    )
    with contextlib.suppress(AlreadyExistsError):
        store.create(record.path, record.to_json())
    return record.token
