"""From what a judge wrote to a reward between 0.0 and 1.0."""

import json
import math
import re
from typing import Any

from stages.score.judge_spec import JudgeSpec

_SHOWN = 200


class NoVerdictError(Exception):
    """The answer holds no verdict, or none on the scale; the message shows how it begins."""


def read_verdict(spec: JudgeSpec, answer: str) -> float:
    """The verdict in ``answer``, as its place on the scale: 0.0 at its least, 1.0 at its greatest.

    A judge that reasons gives its verdict last, so the last one counts.

    Raises:
        NoVerdictError: there is none.
    """
    found = _by_pattern(spec.pattern, answer) if spec.pattern else _by_key(spec.json_key, answer)
    low, high = spec.scale
    number = _number(found)
    if number is None or not low <= number <= high:
        wanted = f"pattern {spec.pattern!r}" if spec.pattern else f"json_key {spec.json_key!r}"
        what = "no verdict" if found is None else f"the verdict {found!r}, not one"
        raise NoVerdictError(
            f"by {wanted} there is {what} from {low:g} to {high:g} in the answer, which begins: "
            f"{answer[:_SHOWN]!r}"
        )
    return (number - low) / (high - low)


def _by_pattern(pattern: str, answer: str) -> str | None:
    found = list(re.finditer(pattern, answer))
    return found[-1][1] if found else None


def _by_key(key: str | None, answer: str) -> Any:
    """What stands at ``key`` in the last JSON object that has it, whatever stands around that."""
    decoder, place, found = json.JSONDecoder(), 0, None
    while (place := answer.find("{", place)) >= 0:
        try:
            value, place = decoder.raw_decode(answer, place)
        except (ValueError, RecursionError):
            place += 1
            continue
        found = value.get(key, found)
    return found


def _number(found: Any) -> float | None:
    """``found`` as a finite number; None where it is none. A Boolean is none."""
    if isinstance(found, bool) or not isinstance(found, str | int | float):
        return None
    try:
        number = float(found)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
