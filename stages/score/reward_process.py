"""A reward in a process of its own, which can be killed: timeouts that hold, crashes as data.

The process has no credentials in its environment and no store; it gets rows and gives numbers.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stages.contract import StageError
from stages.score.config import RewardSpec
from stages.score.environment import without_credentials
from stages.score.outcomes import Outcome, from_json, process_ended, timed_out

_START_SECONDS = 120.0
# An async function's own clock is the child's; this one is for a call that blocks its loop.
_GRACE_SECONDS = 1.0
# Ends with no sample in hand, in a row, after which another start would be the same again.
_MAX_IDLE_ENDS = 3
_END_SECONDS = 5.0
_CHUNK = 1 << 16

Event = tuple[int, Outcome | None]


class RewardProcess:
    """The parent's side. Starts at once; ready when it is asked for the first outcome."""

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec
        self._seconds_of_a_call = spec.timeout_seconds or float("inf")
        self._grace = 0.0
        # Between two calls a slow pace may lie.
        self._seconds_idle = _START_SECONDS + 1 / (spec.calls_per_second or 1)
        self._child: _Child | None = _Child(spec)
        self._idle_ends = 0

    @property
    def pid(self) -> int | None:
        """The process's id; None where the last one was ended."""
        return None if self._child is None else self._child.process.pid

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
        """An event when a sample's call begins (None) and when it ends, by index in ``rows``.

        A call that runs out of time, or ends the process, costs its sample alone: the rest go
        on in a fresh process.

        Raises:
            StageError: the reward can't be loaded, or what it gives is of no use.
        """
        left = dict.fromkeys(range(len(rows)))
        # Calls that were in flight together when the process ended: one of them did it.
        suspects: list[int] = []
        while left or suspects:
            tried = [suspects.pop(0)] if suspects else list(left)
            run = _Run([rows[index] for index in tried])
            for place, outcome in self._attempt(run):
                if outcome is not None:
                    left.pop(tried[place], None)
                yield tried[place], outcome
            if run.in_flight:
                caught = [tried[place] for place in run.in_flight]
                if len(caught) == 1 or self._spec.batched:
                    for index in caught:
                        del left[index]
                        yield index, run.end
                else:
                    suspects += caught

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _attempt(self, run: "_Run") -> Iterator[Event]:
        """Events of one process over ``run``, until it is through, or the process is ended."""
        if self._child is None:
            self._child = _Child(self._spec)
        child = self._child
        child.send({"rows": run.rows})
        while True:
            try:
                words = child.receive(self._deadline(run.in_flight))
            except _TimeIsUpError:
                run.end = timed_out(self._seconds_of_a_call)
            except _EndedError:
                run.end = process_ended(child.status())
            if run.end is not None:
                self.close()
                self._count_idle_end(run.in_flight)
                return
            if words[0] == "end":
                return
            if words[0] == "refused":
                self.close()
                raise StageError(str(words[1]))
            if words[0] == "ready":
                self._grace = _GRACE_SECONDS if words[1] else 0.0
            else:
                yield self._event(run, words)

    def _event(self, run: "_Run", words: Sequence[Any]) -> Event:
        self._idle_ends = 0
        place = words[0]
        if len(words) == 1:
            run.in_flight[place] = time.monotonic()
            return place, None
        del run.in_flight[place]
        return place, from_json(words[1])

    def _deadline(self, in_flight: Mapping[int, float]) -> float:
        """Until when the next word may take, on the monotonic clock."""
        if in_flight:
            return min(in_flight.values()) + self._seconds_of_a_call + self._grace
        return time.monotonic() + self._seconds_idle

    def _count_idle_end(self, in_flight: Mapping[int, float]) -> None:
        """Give up on a process that ends again and again without a sample to blame."""
        if in_flight:
            return
        self._idle_ends += 1
        if self._idle_ends >= _MAX_IDLE_ENDS:
            raise StageError(
                f"reward {self._spec.column!r}: its process ended {self._idle_ends} times in a "
                "row before a call began: see what it wrote to standard error"
            )


@dataclass
class _Run:
    """Rows given to one process: which calls are in flight, since when, and how it ended."""

    rows: Sequence[Mapping[str, Any]]
    in_flight: dict[int, float] = field(default_factory=dict)
    end: Outcome | None = None


class _TimeIsUpError(Exception):
    """Nothing came until the deadline."""


class _EndedError(Exception):
    """The process closed its pipe."""


class _Child:
    """The process and its two pipes."""

    def __init__(self, spec: RewardSpec) -> None:
        child_in, self._out = os.pipe()
        self._in, child_out = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "stages.score.reward_child", str(child_in), str(child_out)],
                stdin=subprocess.DEVNULL,
                pass_fds=(child_in, child_out),
                env=_environment(spec),
                # Killed as a group, with whatever the function has started.
                start_new_session=True,
            )
        finally:
            os.close(child_in)
            os.close(child_out)
        os.set_blocking(self._out, False)
        self._unsent = bytearray()
        self._unread = bytearray()
        self._lines: list[bytes] = []
        self.send({"spec": spec.model_dump(mode="json"), "path": sys.path})

    def send(self, message: Any) -> None:
        """Queue a message; it leaves as the pipe takes it, while answers are waited for."""
        self._unsent += json.dumps(message).encode() + b"\n"

    def receive(self, deadline: float) -> list[Any]:
        """The next answer. Raises _TimeIsUpError, _EndedError."""
        while not self._lines:
            seconds = deadline - time.monotonic()
            waiting = [self._out] if self._unsent else []
            ready, writable, _ = select.select(
                [self._in], waiting, [], None if seconds == float("inf") else max(0.0, seconds)
            )
            if writable:
                self._write()
            if ready:
                self._read()
            elif not writable and time.monotonic() >= deadline:
                raise _TimeIsUpError
        words = json.loads(self._lines.pop())
        return list(words)

    def status(self) -> int:
        """How the process ended. Where it only closed its pipe, it is ended here."""
        try:
            return self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def kill(self) -> None:
        """End the process, and those that it has started."""
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._in)
        os.close(self._out)

    def _write(self) -> None:
        try:
            sent = os.write(self._out, self._unsent[:_CHUNK])
        except BrokenPipeError:
            raise _EndedError from None
        del self._unsent[:sent]

    def _read(self) -> None:
        data = os.read(self._in, _CHUNK)
        if not data:
            raise _EndedError
        self._unread += data
        whole, newline, rest = bytes(self._unread).rpartition(b"\n")
        if newline:
            self._lines = whole.split(b"\n")[::-1]
            self._unread = bytearray(rest)


def _environment(spec: RewardSpec) -> dict[str, str]:
    # The child finds `stages` before it is told where else to look.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**without_credentials(keep=spec.environment), "PYTHONPATH": path}
