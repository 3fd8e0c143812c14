"""Which prompt rows an iteration takes: a pure function, so nothing is lost, repeated or skewed.

There is no cursor. An iteration's rows follow from the data, the seed and the positions at which
the iteration before it ended: how many prompts had been drawn from each source. Row
``order(source, epoch)[p % rows]`` of epoch ``p // rows`` is a source's draw ``p``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import numpy as np

from artifacts.keys import key_of


@dataclass(frozen=True)
class Selected:
    """A prompt row chosen for an iteration. ``row`` counts within its source."""

    source: int
    epoch: int
    row: int


@dataclass(frozen=True)
class Selection:
    """The rows chosen, in order, and where the next iteration begins."""

    rows: list[Selected]
    next_positions: list[int]


def select(
    num_rows: Sequence[int],
    weights: Sequence[float],
    seed: int,
    start: Sequence[int],
    count: int,
    shuffle: bool,
) -> Selection:
    """The next ``count`` rows.

    Each epoch of a source takes every one of its rows once; with ``shuffle`` the order is drawn
    from the seed. Of several sources each draw takes one, with a chance of its weight.

    Args:
        num_rows: rows of each source.
        weights: chance of each source, up to a common factor.
        start: prompts drawn of each source before.
    """
    for source, rows in enumerate(num_rows):
        if rows < 1:
            raise ValueError(f"data source {source} has no rows to select from")
    positions = list(start)
    chosen = []
    for draw in range(sum(start), sum(start) + count):
        source = _source(weights, seed, draw)
        epoch, offset = divmod(positions[source], num_rows[source])
        positions[source] += 1
        row = int(_order(num_rows[source], seed, source, epoch)[offset]) if shuffle else offset
        chosen.append(Selected(source, epoch, row))
    return Selection(chosen, positions)


def num_to_draw(wanted: int, found: Sequence[int], max_rounds: int, oversample: float) -> int:
    """Groups that an iteration's next round draws; 0: there is no next round.

    As many as are missing, times ``oversample``, rounded up. DAPO, arXiv:2503.14476, section 3.2.

    Args:
        wanted: groups with spread that make up the iteration's batch.
        found: groups with spread that each round before has given.
    """
    missing = wanted - sum(found)
    if missing <= 0 or len(found) >= max_rounds:
        return 0
    # As it is written: in binary, 1.1 is a little more than that, and 10 x 1.1 would be 12.
    return math.ceil(missing * Fraction(str(oversample)))


def _source(weights: Sequence[float], seed: int, draw: int) -> int:
    if len(weights) == 1:
        return 0
    # By place and not by a generator's state: any process finds the same source for a draw.
    chance = int(key_of({"seed": seed, "draw": draw})[:13], 16) / 16**13
    sums = list(accumulate(weights))
    return next(n for n, total in enumerate(sums) if chance * sums[-1] < total)


@lru_cache(maxsize=16)
def _order(num_rows: int, seed: int, source: int, epoch: int) -> np.ndarray:
    # RandomState's streams are frozen for ever; those of numpy's newer Generator are not.
    drawn = key_of({"seed": seed, "source": source, "epoch": epoch})
    return np.random.RandomState(int(drawn[:8], 16)).permutation(num_rows)
