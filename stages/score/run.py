"""The score stage: rollout shards in, a score shard for each out."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.manifests import Shard
from artifacts.shards import find_shards, read_shards
from artifacts.store import Store
from stages.contract import Committed, Product, Progress, StageError, Work, find_or_make
from stages.ledger import write_ledger
from stages.score.config import ScoreConfig
from stages.score.scorers import Scorers

VERSION = 2


def score_work(
    iteration: int,
    score: ScoreConfig,
    functions: Mapping[str, str],
    rollout: Committed,
    reference: Mapping[str, Any] | None,
) -> Work:
    """The description of an iteration's scoring.

    Args:
        functions: reward column to source digest.
        reference: digest, dtype and temperature of the reference pass; None for none.
    """
    identity = {
        "rewards": [spec.identity() for spec in score.rewards],
        "reference": None if reference is None else dict(reference),
    }
    inputs = {"rollout": rollout.ref}
    return Work("scores", "score", VERSION, iteration, identity, inputs, functions)


def run(
    store: Store,
    work: Work,
    rollout: Committed,
    config: ScoreConfig,
    scorers: Callable[[], Scorers],
    progress: Progress,
) -> Committed:
    """Score the rollout's shards. ``scorers`` is called only where something is missing."""
    return find_or_make(store, work, lambda: _make(store, work, rollout, config, scorers, progress))


def _make(
    store: Store,
    work: Work,
    rollout: Committed,
    config: ScoreConfig,
    scorers: Callable[[], Scorers],
    progress: Progress,
) -> Product:
    sources = dict(enumerate(rollout.manifest.shards))
    shards = find_shards(store, work.folder, sources)
    missing = [(index, shard) for index, shard in sources.items() if index not in shards]
    num_found = len(shards)
    progress(total=sum(shard.rows for _, shard in missing), found=num_found)
    entries = []
    if missing:
        for event in scorers().score(store, rollout.folder, work.folder, missing):
            shards[event.index] = event.shard
            entries.append(event.entry)
            progress(shard=event.index, rows=event.shard.rows, samples=event.shard.rows)
    whole = _all_of(sources, shards)
    table = pa.concat_tables(read_shards(store, work.folder, whole, _per_sample(config)))
    if config.on_null == "fail":
        refuse_nulls(table)
    provenance = {
        "ledger": write_ledger(store, work.folder, entries),
        "made": len(entries),
        "found": num_found,
    }
    return Product(whole, {}, reward_metrics(table), provenance)


def _all_of(sources: Mapping[int, Shard], shards: Mapping[int, Shard]) -> list[Shard]:
    for index, source in sources.items():
        rows = shards[index].rows if index in shards else 0
        if rows != source.rows:
            raise StageError(f"score shard {index}: expected {source.rows} rows, found {rows}")
    return [shards[index] for index in sources]


def _per_sample(config: ScoreConfig) -> list[str]:
    """The columns with a value a sample: those with one a token don't fit in memory together."""
    components = [f"reward.{spec.column}" for spec in config.rewards]
    return ["sample_id", "group_id", "reward", "error", *components]


def refuse_nulls(scores: pa.Table) -> None:
    """Raise StageError where a reward is null, with the first three."""
    rows = scores.filter(pc.is_null(scores["reward"])).to_pylist()
    if rows:
        shown = "; ".join(_explain(row) for row in rows[:3])
        raise StageError(
            f"{len(rows)} of {scores.num_rows} samples have no reward, and score.on_null is fail: "
            f"{shown}"
        )


def _explain(row: Mapping[str, Any]) -> str:
    if row["error"] is None:
        return f"sample {row['sample_id']}: a reward abstained"
    first = json.loads(row["error"])[0]
    return (
        f"sample {row['sample_id']}: {first['function']} raised {first['type']}: {first['message']}"
    )


def reward_metrics(scores: pa.Table) -> dict[str, float | None]:
    """Statistics of a score table, for people."""
    rewards = _floats(scores["reward"])
    known = rewards[~np.isnan(rewards)]
    metrics: dict[str, float | None] = {
        "reward/mean": float(known.mean()) if len(known) else None,
        "reward/std": float(known.std()) if len(known) else None,
        "reward/min": float(known.min()) if len(known) else None,
        "reward/max": float(known.max()) if len(known) else None,
        "score/null_share": 1 - len(known) / len(rewards),
        "score/error_share": 1 - scores["error"].null_count / scores.num_rows,
        "score/zero_spread_share": zero_spread_share(scores["group_id"].to_pylist(), rewards),
    }
    for name in scores.column_names:
        if name.startswith("reward."):
            values = _floats(scores[name])
            if not np.isnan(values).all():
                metrics[f"reward/{name.removeprefix('reward.')}"] = float(np.nanmean(values))
    return metrics


def zero_spread_share(groups: Sequence[str], rewards: np.ndarray) -> float:
    """Share of groups whose known rewards are all equal: they teach nothing."""
    members: dict[str, set[float]] = defaultdict(set)
    for group, reward in zip(groups, rewards, strict=True):
        members[group] |= set() if np.isnan(reward) else {float(reward)}
    return sum(len(values) <= 1 for values in members.values()) / len(members)


def _floats(column: pa.ChunkedArray) -> np.ndarray:
    return column.to_numpy().astype(np.float64)
