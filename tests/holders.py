"""Holders of a run: real processes, and records as other hosts would leave them."""

import os
import signal
import time
from dataclasses import replace

from artifacts.lease import Record, hold
from artifacts.processes import Process
from artifacts.store import Store
from child import start_child

HOLDER = """
import sys
from artifacts.errors import HeldError, LeaseLostError
from artifacts.lease import hold
from artifacts.manifests import Manifest, write_manifest
from artifacts.store import Store

store = Store(sys.argv[1])
store.names("lease")
print("ready", flush=True)
sys.stdin.readline()
try:
    with hold(store, float(sys.argv[2])) as lease:
        print("holds", lease.record.token, flush=True)
        for line in sys.stdin:
            folder = line.strip()
            manifest = Manifest("scores", "score", 1, folder, {}, {}, {}, ())
            try:
                write_manifest(store, folder, manifest)
                print("committed", flush=True)
            except LeaseLostError as error:
                print("lost", error, flush=True)
except HeldError as error:
    print("refused", error, flush=True)
"""

ELSEWHERE = Process(4242, boot="another boot", pid_namespace="pid:[1]", start=7)
SINCE = "2026-11-30T08:00:00+00:00"


class Child:
    """A process that holds a run, or tries to."""

    def __init__(self, store: Store, ttl_seconds: float) -> None:
        self.process = start_child(HOLDER, store.url, ttl_seconds)
        self.pid = self.process.pid

    def say(self, line: str = "") -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Children:
    """The children of a test."""

    def __init__(self) -> None:
        self.all: list[Child] = []

    def start(self, store: Store, ttl_seconds: float, count: int = 1) -> list[Child]:
        """Children that stand at the door."""
        children = [Child(store, ttl_seconds) for _ in range(count)]
        self.all += children
        assert [child.hear() for child in children] == ["ready"] * count
        return children

    def start_holder(self, store: Store, ttl_seconds: float) -> Child:
        """A child that holds the run."""
        (child,) = self.start(store, ttl_seconds)
        child.say()
        assert child.hear() == "holds 1"
        return child


def write_lease(store: Store, **values) -> Record:
    """The record of a holder on another host, as it would lie there."""
    facts = {"token": 5, "owner": "theirs", "host": "far", "process": ELSEWHERE, "since": SINCE}
    record = Record(**{"ttl_seconds": 0.3, **facts, **values})
    store.put(record.path, record.to_json())
    return record


def beat(store: Store, record: Record) -> None:
    store.put(record.path, replace(record, beat=record.beat + 1).to_json())


def take(store: Store, ttl_seconds: float = 30.0) -> tuple[int, list[Record], float]:
    """Take the run and let go: the token, whom it was waited for, and the seconds it took."""
    waits: list[Record] = []
    start = time.monotonic()
    with hold(store, ttl_seconds, waits.append) as lease:
        return lease.record.token, waits, time.monotonic() - start
