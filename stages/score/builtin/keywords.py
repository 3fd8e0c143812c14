"""Rewards for words that stand in a response, for the whole of it or at the token they end with."""

from collections.abc import Iterator, Mapping, Sequence


def keywords(
    text: str, words: Mapping[str, float], ignore_case: bool = True, **row: object
) -> float:
    """The sum of each occurrence's value: ``words`` maps a text to what it is worth."""
    return sum((value for _, value in _occurrences(text, words, ignore_case)), start=0.0)


def keyword_tokens(
    tokens: Sequence[str], words: Mapping[str, float], ignore_case: bool = True, **row: object
) -> list[float]:
    """Each occurrence's value at the token that holds its last character."""
    rewards = [0.0] * len(tokens)
    ends = _ends(tokens)
    for end, value in _occurrences("".join(tokens), words, ignore_case):
        rewards[next(i for i, reach in enumerate(ends) if end <= reach)] += value
    return rewards


def _occurrences(
    text: str, words: Mapping[str, float], ignore_case: bool
) -> Iterator[tuple[int, float]]:
    """End (characters) and value of each occurrence; those of one word don't overlap."""
    # Lower case by character: one that has several in lower case would shift what follows.
    plain = "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
    for word, value in sorted(words.items()):
        where, wanted = (plain, word.lower()) if ignore_case else (text, word)
        start = where.find(wanted)
        while start >= 0:
            yield start + len(wanted), float(value)
            start = where.find(wanted, start + len(wanted))


def _ends(tokens: Sequence[str]) -> list[int]:
    ends, length = [], 0
    for token in tokens:
        length += len(token)
        ends.append(length)
    return ends


def check_keywords(words: Mapping[str, float] | None = None, ignore_case: bool = True) -> None:
    """Raise ValueError where there are no words, or a word's value is no number."""
    values = words.values() if isinstance(words, Mapping) else []
    if not values or "" in (words or {}) or any(_is_no_number(value) for value in values):
        raise ValueError(
            f"reward keywords: words is {words!r}: give options: {{words: {{a text: its value}}}}"
        )


check_keyword_tokens = check_keywords


def _is_no_number(value: object) -> bool:
    return isinstance(value, bool) or not isinstance(value, int | float)
