"""What a reward gave for a sample: a number, numbers a token, nothing, or an error as data.

An outcome crosses a pipe as JSON and ends in a digested shard, so an error's record holds no
address, no host path and no worker's name: the same failure gives the same bytes anywhere.
"""

import math
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts.secrets import redacted

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")
# An absolute path of two parts or more; its last part is what a reader needs.
_PATH = re.compile(r"(?<![\w:/.])/(?:[^\s/'\"():,;]+/)+(?=[^\s/'\"():,;])")
_MESSAGE_LIMIT = 2000
# Of a recursion without end, the last ones.
_FRAMES_LIMIT = 20
_CALLER = str(Path(__file__).with_name("calls.py"))


@dataclass(frozen=True)
class Failure:
    """Why there is no value: an exception's class, message and frames, outermost first."""

    type: str
    message: str
    traceback: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """``value`` of a sample, where per token the sum of ``tokens``; all None: it abstained.

    ``usage`` is what a judge's answers took, failed ones too: tokens in and out.
    """

    value: float | None = None
    tokens: tuple[float, ...] | None = None
    failure: Failure | None = None
    usage: tuple[int, int] | None = None


def failed(error: BaseException) -> Outcome:
    """The outcome of a call that raised ``error``. Frames of ours that made it are left out."""
    frames = list(traceback.extract_tb(error.__traceback__))
    while frames and frames[0].filename == _CALLER:
        del frames[0]
    frames = frames[-_FRAMES_LIMIT:]
    return Outcome(
        failure=Failure(
            type(error).__name__,
            normalized(str(error)),
            tuple(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in frames),
        )
    )


def timed_out(seconds: float) -> Outcome:
    """The outcome of a call that was ended after ``seconds``."""
    return Outcome(failure=Failure("TimeoutError", f"timed out after {seconds:g} s"))


def process_ended(status: int) -> Outcome:
    """The outcome of a call in which the process ended, with ``status`` as Popen gives it."""
    how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
    return Outcome(failure=Failure("ProcessEnded", f"its process {how} during the call"))


def normalized(text: str) -> str:
    """``text`` without credentials, memory addresses and folders of this host, and not endless."""
    short = _PATH.sub("…/", _ADDRESS.sub("0x…", redacted(text)))
    return short if len(short) <= _MESSAGE_LIMIT else f"{short[:_MESSAGE_LIMIT]} …"


def checked_value(value: Any) -> Outcome:
    """The outcome of a call that returned ``value``, for a whole sample."""
    try:
        return Outcome(checked(value))
    except (TypeError, ValueError) as error:
        return Outcome(failure=Failure(type(error).__name__, normalized(str(error))))


def checked_tokens(values: Any, num_tokens: int) -> Outcome:
    """The outcome of a call that returned ``values``, one a response token."""
    if values is None:
        return Outcome()
    try:
        numbers = [checked(value) for value in as_list(values, num_tokens, "response tokens")]
        missing = [place for place, number in enumerate(numbers) if number is None]
        if missing:
            raise ValueError(f"token {missing[0]} has None: give a number, such as 0.0")
    except (TypeError, ValueError) as error:
        return Outcome(failure=Failure(type(error).__name__, normalized(str(error))))
    tokens = tuple(number for number in numbers if number is not None)
    return Outcome(math.fsum(tokens), tokens)


def checked(value: Any) -> float | None:
    """``value`` as a finite float, or None.

    Raises:
        TypeError: it is no number.
        ValueError: it is NaN or infinite.
    """
    if value is None:
        return None
    is_number = hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0
    if isinstance(value, str) or not is_number:
        raise TypeError(f"a reward is a number or None, and this is {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a reward is finite, and this is {number}")
    return number


def as_list(values: Any, count: int, of: str) -> Sequence[Any]:
    """``values`` as a sequence of ``count``: a list, a tuple, or an array of one dimension.

    Raises:
        TypeError: it is something else.
        ValueError: it holds another count.
    """
    if getattr(values, "ndim", None) == 1 and hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise TypeError(f"expected a list of {count} for {count} {of}, got {_described(values)}")
    if len(values) != count:
        raise ValueError(f"expected {count} for {count} {of}, got {len(values)}")
    return values


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    name = f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"
    if shape:
        return f"{name} of shape {tuple(shape)}"
    return "None" if value is None else name


def to_json(outcome: Outcome) -> list[Any]:
    """``outcome`` as JSON values."""
    failure = outcome.failure
    return [
        outcome.value,
        outcome.tokens,
        failure and [failure.type, failure.message, failure.traceback],
    ]


def from_json(value: Sequence[Any]) -> Outcome:
    """The outcome that :func:`to_json` made ``value`` of.

    Raises:
        ValueError, TypeError: ``value`` has another form, which user code wrote into the pipe.
    """
    number, tokens, failure = value
    return Outcome(
        checked(number),
        None if tokens is None else tuple(float(token) for token in tokens),
        None if failure is None else _failure(*failure),
    )


def _failure(type_: Any, message: Any, frames: Sequence[Any]) -> Failure:
    return Failure(str(type_), str(message), tuple(map(str, frames)))
