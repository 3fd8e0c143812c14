"""A sample's whole reward: what its whole response got, and what its tokens got, together."""

import numpy as np
import pyarrow as pa


def total_rewards(scores: pa.Table) -> np.ndarray:
    """Whole rewards of a score table's samples, (S,) float64; NaN where there is none."""
    sums = [0.0 if value is None else sum(value) for value in scores["token_rewards"].to_pylist()]
    return float_column(scores["reward"]) + np.array(sums, np.float64)


def float_column(column: pa.ChunkedArray) -> np.ndarray:
    """A column of numbers as float64; NaN where it is null."""
    values: np.ndarray = column.to_numpy().astype(np.float64)
    return values


def known_mean(values: np.ndarray) -> float | None:
    """Mean of what is not NaN; None where nothing is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
