"""Two scorings of the same samples side by side: means, correlation, verdicts that flipped."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from stages.totals import known_mean, total_rewards


@dataclass(frozen=True)
class Comparison:
    """Of an iteration's samples, in both scorings.

    Attributes:
        old_mean, new_mean: of the whole rewards that are known; None where none is.
        correlation: Pearson's, of samples that both know; None where one has no spread.
        flipped: samples that both know, and that one alone calls right.
        old_null, new_null: samples without a reward.
    """

    iteration: int
    samples: int
    old_mean: float | None
    new_mean: float | None
    correlation: float | None
    flipped: int
    old_null: int
    new_null: int


def compare(iteration: int, old: pa.Table, new: pa.Table, verdict: float) -> Comparison:
    """Hold two score tables of the same samples, in the same order, against each other.

    Args:
        verdict: a sample is right where its whole reward reaches it.

    Raises:
        ValueError: they don't hold the same samples.
    """
    if old["sample_id"] != new["sample_id"]:
        raise ValueError("the two tables don't hold the same samples in the same order")
    olds, news = total_rewards(old), total_rewards(new)
    known = ~np.isnan(olds) & ~np.isnan(news)
    return Comparison(
        iteration=iteration,
        samples=len(olds),
        old_mean=known_mean(olds),
        new_mean=known_mean(news),
        correlation=_correlation(olds[known], news[known]),
        flipped=int(((olds >= verdict) != (news >= verdict))[known].sum()),
        old_null=int(np.isnan(olds).sum()),
        new_null=int(np.isnan(news).sum()),
    )


def _correlation(old: np.ndarray, new: np.ndarray) -> float | None:
    if len(old) < 2 or old.min() == old.max() or new.min() == new.max():
        return None
    return float(np.corrcoef(old, new)[0, 1])
