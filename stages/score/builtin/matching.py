"""Whether a response is the right answer, word for word or nearly, and has the right form."""

import re
import string
import unicodedata

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(
    text: str, ground_truth: str | None, strip: bool = True, **row: object
) -> float | None:
    """1.0 where the response is the ground truth, else 0.0. None where there is no truth.

    Args:
        strip: leave out blanks and line ends around both.
    """
    if ground_truth is None:
        return None
    return float(text.strip() == ground_truth.strip() if strip else text == ground_truth)


def normalized_match(text: str, ground_truth: str | None, **row: object) -> float | None:
    """1.0 where both are equal after normalisation, else 0.0. None where there is no truth."""
    return None if ground_truth is None else float(normalize(text) == normalize(ground_truth))


def normalize(text: str) -> str:
    """As SQuAD's evaluation compares answers: lower case, no ASCII punctuation, no English
    articles, single blanks (Rajpurkar et al. 2016); Unicode by NFKC before."""
    plain = unicodedata.normalize("NFKC", text).casefold().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def format_match(text: str, pattern: str, whole: bool = True, **row: object) -> float:
    """1.0 where the regular expression ``pattern`` matches, else 0.0; a dot matches line ends.

    Args:
        whole: it has to match all of the response, but for blanks around it.
    """
    found = re.fullmatch if whole else re.search
    return float(found(pattern, text.strip() if whole else text, re.DOTALL) is not None)


def check_format_match(pattern: str = "", whole: bool = True) -> None:
    """Raise ValueError where ``pattern`` is missing or no regular expression."""
    if not pattern:
        raise ValueError("reward format needs options: {pattern: a regular expression}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"reward format: pattern {pattern!r} is wrong: {error}") from None
