"""What a person sees of a run: a line a stage, and a bar on a terminal while one works.

Lines are ``time event key=value …``: the same keys in the same places, so that the eye finds them
and a program can split them. Where nobody watches a bar, a stage's start is a line too, and a long
stage says from time to time how far it is.
"""

import logging
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from artifacts.manifests import Manifest
from flows.publication import num_tokens
from flows.status import num_samples

log = logging.getLogger("ratchet")

_LOUD = ("alembic", "httpx", "mlflow", "prefect", "ray", "urllib3")
# Columns that stand below each other from line to line; a longer value only shifts the rest.
_WIDTHS = {"iteration": 13, "samples": 12, "seconds": 13, "tokens": 13, "tokens/s": 13}
# What is seen of a stage at work where no bar shows it.
_DETAILS = ("start", "weights", "working")
_BEAT_SECONDS = 30.0


def set_up_logging() -> None:
    """Lines of ours to standard error; of third parties, what went wrong."""
    handler = _StandardError()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.WARNING)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


class Report:
    """Log lines always; bars where standard error is a terminal."""

    def __init__(self) -> None:
        self._bars: Progress | None = None
        if sys.stderr.isatty():
            self._bars = _bars()
            self._bars.start()

    def say(self, event: str, **fields: Any) -> None:
        """One line: ``event key=value …``."""
        if self._bars is None or event not in _DETAILS:
            log.info(_line(event, fields))

    def stage(self, stage: str, place: str, manifest: Manifest, was_reused: bool) -> None:
        """The line of a stage that has committed."""
        seconds, tokens = manifest.provenance["seconds"], num_tokens(manifest)
        metrics = {
            "reward": manifest.metrics.get("reward/mean"),
            "loss": manifest.metrics.get("update/loss"),
            "grad_norm": manifest.metrics.get("update/grad_norm"),
        }
        self.say(
            stage,
            iteration=place,
            samples=num_samples(manifest),
            seconds=f"{seconds:.2f}",
            tokens=tokens,
            **{"tokens/s": int(tokens / seconds) if tokens and seconds > 0 else None},
            **metrics,
            state="reused" if was_reused else None,
        )

    def progress(self, stage: str, place: str) -> Callable[..., None]:
        """What a stage calls with ``total``, ``samples``, ``tokens`` and ``shard``.

        ``place`` is its iteration, and from the second round on, its round: ``3``, ``3.2``.
        """
        return _StageProgress(self, self._bars, stage, place)

    def close(self) -> None:
        """Take the bars away."""
        if self._bars is not None:
            self._bars.stop()


class _StageProgress:
    """One stage's bar, or where there is none, a line from time to time."""

    def __init__(self, report: Report, bars: Progress | None, stage: str, place: str) -> None:
        self._report, self._bars = report, bars
        self._stage, self._place = stage, place
        self._bar: Any = None
        self._total = self._samples = self._tokens = 0
        self._start = self._said = time.monotonic()

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
        self._samples += samples
        # A committed shard's tokens have been counted sample by sample.
        self._tokens += tokens if shard is None else 0
        if shard is not None:
            log.debug("%s iteration=%s shard=%d", self._stage, self._place, shard)
        if self._bars is None:
            self._say_from_time_to_time()
        else:
            self._move()

    def _begin(self, total: int, found: int) -> None:
        self._total = total
        self._start = self._said = time.monotonic()
        self._report.say(
            "start",
            stage=self._stage,
            iteration=self._place,
            samples=total,
            shards_found=found or None,
        )
        if self._bars is not None and total:
            self._bar = self._bars.add_task(f"{self._stage} {self._place}", total=total, rate="")

    def _move(self) -> None:
        if self._bars is None or self._bar is None:
            return
        rate = f"{self._rate():,} tokens/s" if self._tokens else ""
        self._bars.update(self._bar, completed=self._samples, rate=rate)
        if self._samples >= self._total:
            self._bars.remove_task(self._bar)
            self._bar = None

    def _say_from_time_to_time(self) -> None:
        if time.monotonic() - self._said >= _BEAT_SECONDS:
            self._said = time.monotonic()
            self._report.say(
                "working",
                stage=self._stage,
                iteration=self._place,
                samples=f"{self._samples}/{self._total}",
                tokens=self._tokens or None,
                **{"tokens/s": self._rate() or None},
            )

    def _rate(self) -> int:
        return int(self._tokens / max(time.monotonic() - self._start, 1e-3))


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to whatever standard error is now: bars put themselves there to stay below lines."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # an attribute there, looked up late here
        return sys.stderr


def _bars() -> Progress:
    return Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _line(event: str, fields: Mapping[str, Any]) -> str:
    parts = [
        f"{name}={_short(value)}".ljust(_WIDTHS.get(name, 0))
        for name, value in fields.items()
        if value is not None
    ]
    return " ".join([f"{event:<8}", *parts]).rstrip()


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
