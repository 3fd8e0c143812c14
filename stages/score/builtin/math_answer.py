"""Whether the answer of a mathematical response is equal to the right one, as mathematics.

Math-Verify parses and compares. Its own time limit is an alarm signal, which reaches neither
threads nor a power that is being computed; it is off, and ``timeout_seconds`` ends the process.
"""

import logging
import re
from fractions import Fraction
from functools import lru_cache

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?(?![\w/])")
_PLAIN = re.compile(r"-?\d+(?:\.\d+)?|-?\d+/0*[1-9]\d*")
_MARK = "####"
# Values further apart than this are different; it is far above the error of so many digits.
_APART, _DIGITS = 1e-9, 30


def math_answer(
    text: str, ground_truth: str | None, extract: str = "auto", **row: object
) -> float | None:
    r"""1.0 where the answers are equal, else 0.0, also where the response has none.

    None where there is no truth, or it can't be read as mathematics.

    Args:
        extract: ``boxed``, what stands in the last ``\boxed{}``; ``last_number``; ``auto``, boxed
            where there is a box, else the last number.
    """
    if ground_truth is None or not (truth := _truth(ground_truth)):
        return None
    answer = extracted(text, extract)
    if answer is None:
        return 0.0 if _number(truth) is not None or _parsed(truth) else None
    numbers = _number(answer), _number(truth)
    if None not in numbers:
        return float(numbers[0] == numbers[1])
    return _compared(answer, truth)


def check_math_answer(extract: str = "auto") -> None:
    """Raise ValueError where ``extract`` is no way to find an answer."""
    if extract not in ("auto", "boxed", "last_number"):
        raise ValueError(f"reward math: extract is {extract!r}: take auto, boxed or last_number")


def extracted(text: str, extract: str) -> str | None:
    """The answer that ``text`` gives; None where it gives none."""
    if extract != "last_number" and (boxed := last_boxed(text)) is not None:
        return boxed
    numbers = [] if extract == "boxed" else _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{}`` that is closed; None where there is none."""
    for begin in reversed(list(_BOXED.finditer(text))):
        depth, escaped = 1, False
        for place in range(begin.end(), len(text)):
            character = text[place]
            if not escaped and character in "{}":
                depth += 1 if character == "{" else -1
                if depth == 0:
                    return text[begin.end() : place].strip()
            escaped = character == "\\" and not escaped
    return None


def _truth(ground_truth: str) -> str:
    boxed = last_boxed(ground_truth)
    return boxed if boxed is not None else ground_truth.rpartition(_MARK)[2].strip()


def _number(text: str) -> Fraction | None:
    plain = text.strip().strip("$").replace(",", "").removeprefix("+").rstrip(".")
    return Fraction(plain) if _PLAIN.fullmatch(plain) else None


def _compared(answer: str, truth: str) -> float | None:
    from math_verify import verify

    gold = _parsed(truth)
    if not gold:
        return None
    pairs = [(g, f) for g in gold for f in _parsed(answer) if not _are_apart(g, f)]
    return float(any(verify(*pair, timeout_seconds=None, raise_on_error=True) for pair in pairs))


def _are_apart(gold: object, found: object) -> bool:
    """Whether both are exact numbers of plainly different value.

    Math-Verify would hand their difference to ``simplify``, for ten times the time of the rest, to
    find that it is not zero. Decimals and percentages it compares by rules of its own.
    """
    from sympy import Expr, Float, UnevaluatedExpr

    for value in (gold, found):
        if not isinstance(value, Expr) or not value.is_number or value.has(Float, UnevaluatedExpr):
            return False
    difference = abs((gold - found).evalf(_DIGITS))  # type: ignore[operator]
    return bool(difference.is_Float and difference > _APART)


# A group's samples have one truth, and often the same answers.
@lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[object, ...]:
    """Math-Verify's reading of a bare answer; () where it finds no mathematics."""
    from math_verify import LatexExtractionConfig, parse

    # They warn at each call that time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found: list[object] = parse(
        rf"\boxed{{{text.strip().strip('$')}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
        raise_on_error=True,
    )
    return tuple(found)
