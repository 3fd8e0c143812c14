"""Rewards of the `sort` example: functions of a response and the right answer, nothing else."""


def exact(text: str, ground_truth: str, **row) -> float:
    """1.0 where the response is the right answer and nothing more, else 0.0."""
    return float(text == ground_truth)


def ordered(text: str, ground_truth: str, **row) -> float:
    """Share of places, 0.0 to 1.0, that hold the right character.

    Partial credit to mix in with a small weight where `exact` alone is too rare. Places are
    counted over the longer of the two, so neither a short nor a long response gains.
    """
    hits = sum(mine == right for mine, right in zip(text, ground_truth, strict=False))
    return hits / max(len(text), len(ground_truth), 1)
