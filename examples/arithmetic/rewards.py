"""Rewards of the `arithmetic` example: the right number, and the format that was asked for."""

import re

NUMBER = r"(?<!\d)-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
ENDING = re.compile(rf"Answer: {NUMBER}\.?\Z")


def final_number(text: str) -> float | None:
    """The number that a response comes to; None where it has none.

    The one after the last `Answer:`, behind an equals sign if that line has one; where nothing is
    stated so, the last number of all.
    """
    _, marker, stated = text.lower().rpartition("answer:")
    line = stated.strip().partition("\n")[0].rpartition("=")[2]
    after_marker = re.findall(NUMBER, line) if marker else []
    found = after_marker[:1] or re.findall(NUMBER, text)[-1:]
    return float(found[0].replace(",", "")) if found else None


def correct(text: str, ground_truth: str, **row) -> float | None:
    """1.0 where the response comes to the right number, else 0.0; None if the row has none.

    Any spelling of the number counts: 1200, 1,200 or 1200.0.
    """
    truth = final_number(ground_truth)
    return None if truth is None else float(final_number(text) == truth)


def formatted(text: str, ground_truth: str, **row) -> float:
    """1.0 where the response says `Answer: <number>` once, at its end; else 0.0."""
    is_last = ENDING.search(text.rstrip()) is not None
    return float(is_last and text.lower().count("answer:") == 1)
