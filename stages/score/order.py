"""What workers of the score stage are asked for, and what they say on the way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from artifacts.manifests import Shard
from artifacts.shards import read_shard
from artifacts.store import Store
from stages.score.outcomes import Outcome


@dataclass(frozen=True)
class ShardOrder:
    """A shard to score, for the ``attempt``-th time from 1.

    Attributes:
        earlier: folder and shard of scores whose errors are to be tried again; what has none is
            kept as it is.
        values: the critic's, (T,) a sample; None without one.
        rated: what reward models gave, by their columns; an outcome for each sample to score.
        read: the ledger rows of that.
    """

    index: int
    rollout: Shard
    earlier: tuple[str, Shard] | None = None
    attempt: int = 1
    values: Sequence[np.ndarray] | None = None
    rated: Mapping[str, Sequence[Outcome]] = field(default_factory=dict)
    read: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class InHand:
    """Progress of a shard that a worker has died on: a reward is about to see this sample."""

    index: int
    sample: str


@dataclass(frozen=True)
class Rated:
    """Progress: a reward model has read a shard; an outcome for each sample to score.

    ``entry`` is the ledger row of its reading.
    """

    index: int
    outcomes: Sequence[Outcome]
    entry: Mapping[str, Any]


@dataclass(frozen=True)
class Finished:
    """Progress: a shard is scored. ``errors`` counts its samples that have one.

    ``entries`` are its ledger rows: of its scoring, and of what reward models read for it.
    """

    index: int
    shard: Shard
    entries: Sequence[Mapping[str, Any]]
    errors: int


def read_earlier(store: Store, order: ShardOrder) -> pa.Table | None:
    """The scores whose errors are tried again; None in a first scoring."""
    return None if order.earlier is None else read_shard(store, *order.earlier)


def places_to_score(rollouts: pa.Table, earlier: pa.Table | None) -> pa.Array:
    """Which rows of ``rollouts`` are due: all, or those that had an error."""
    if earlier is None:
        return pa.array(range(rollouts.num_rows), pa.int64())
    errors = earlier["error"].to_pylist()
    return pa.array([n for n, error in enumerate(errors) if error is not None], pa.int64())
