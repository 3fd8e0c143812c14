"""What a person sees of a run: a line a stage, and bars while one works."""

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

log = logging.getLogger("ratchet")


def set_up_logging() -> None:
    """Lines of ours to standard error; of third parties, what went wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


class Report:
    """Log lines always; bars where standard error is a terminal."""

    def __init__(self) -> None:
        self._bars: Progress | None = None
        if sys.stderr.isatty():
            columns = ("{task.description}", BarColumn(), TextColumn("{task.fields[rate]}"))
            console = Console(stderr=True)
            self._bars = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
            self._bars.start()

    def say(self, event: str, **fields: Any) -> None:
        """One line: ``event key=value …``."""
        parts = [f"{name}={_short(value)}" for name, value in fields.items() if value is not None]
        log.info(" ".join([f"{event:<8}", *parts]))

    def progress(self, stage: str, iteration: int) -> Callable[..., None]:
        """What a stage calls with ``total``, ``samples``, ``tokens`` and ``shard``."""
        return _StageProgress(self, self._bars, stage, iteration)

    def close(self) -> None:
        """Take the bars away."""
        if self._bars is not None:
            self._bars.stop()


class _StageProgress:
    """One stage's bar and shard lines."""

    def __init__(self, report: Report, bars: Progress | None, stage: str, iteration: int) -> None:
        self._report, self._bars = report, bars
        self._stage, self._iteration = stage, iteration
        self._bar: TaskID | None = None
        self._tokens = 0
        self._start = time.monotonic()

    def __call__(
        self,
        total: int | None = None,
        samples: int = 0,
        tokens: int = 0,
        shard: int | None = None,
        **fields: Any,
    ) -> None:
        if total is not None:
            self._begin(total, fields.get("found", 0))
        if shard is not None:
            log.debug("%s iteration=%d shard=%d", self._stage, self._iteration, shard)
            return
        self._tokens += tokens
        if self._bars is not None and self._bar is not None:
            seconds = max(time.monotonic() - self._start, 1e-3)
            rate = f"{self._tokens / seconds:,.0f} tokens/s" if self._tokens else ""
            self._bars.update(self._bar, advance=samples, rate=rate)
            if self._bars.tasks[-1].finished:
                self._bars.remove_task(self._bar)
                self._bar = None

    def _begin(self, total: int, found: int) -> None:
        self._start = time.monotonic()
        self._report.say(
            "start",
            stage=self._stage,
            iteration=self._iteration,
            samples=total,
            shards_found=found or None,
        )
        if self._bars is not None:
            name = f"{self._stage} {self._iteration}"
            self._bar = self._bars.add_task(name, total=total, rate="")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
