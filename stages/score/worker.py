"""The score actor: reads a rollout shard, calls the rewards, writes the score shard."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from artifacts.manifests import Shard
from artifacts.schemas import scores_schema
from artifacts.shards import read_shard, write_shard
from artifacts.store import Store
from stages.score.config import RewardSpec
from stages.score.rewards import load_reward, score_sample


@dataclass(frozen=True)
class ReferenceSpec:
    """The reference model's pass: where it is, and how it computes."""

    model: str
    dtype: str
    temperature: float
    max_tokens: int


@dataclass(frozen=True)
class Finished:
    """Progress: a shard is scored. ``entry`` is its ledger row."""

    index: int
    shard: Shard
    entry: Mapping[str, Any]


class ScoreWorker:
    """Reward functions and, where one is asked for, the reference model."""

    def __init__(
        self, name: str, specs: Sequence[RewardSpec], reference: ReferenceSpec | None
    ) -> None:
        self._name = name
        self._rewards = [(spec, load_reward(spec.fn)) for spec in specs]
        self._reference = None
        if reference is not None:
            from stages.score.reference import Reference

            self._reference = Reference(reference)

    def score(
        self, store: Store, source: str, folder: str, shards: Sequence[tuple[int, Shard]]
    ) -> Iterator[Finished]:
        """Score rollout ``shards`` of folder ``source`` into ``folder``, one after another."""
        for index, shard in shards:
            start = time.time()
            rollouts = read_shard(store, source, shard)
            written = write_shard(store, folder, index, self._table(rollouts))
            yield Finished(index, written, self._entry(index, start, written))

    def _table(self, rollouts: pa.Table) -> pa.Table:
        rows = rollouts.to_pylist()
        scored = [score_sample(self._rewards, row) for row in rows]
        columns: dict[str, list[Any]] = {
            "sample_id": [row["sample_id"] for row in rows],
            "group_id": [row["group_id"] for row in rows],
            "reward": [sample.reward for sample in scored],
            "error": [sample.error for sample in scored],
        }
        names = [spec.column for spec, _ in self._rewards]
        for name in names:
            columns[f"reward.{name}"] = [sample.components[name] for sample in scored]
        columns["reference_logprobs"] = (
            [None] * len(rows) if self._reference is None else self._reference.logprobs(rows)
        )
        columns["token_rewards"] = [None] * len(rows)
        return pa.Table.from_pydict(columns, schema=scores_schema(names))

    def _entry(self, index: int, start: float, shard: Shard) -> dict[str, Any]:
        return {
            "unit": f"shard-{index:05d}",
            "worker": f"{self._name}:{os.getpid()}",
            "start": start,
            "seconds": time.time() - start,
            "rows": shard.rows,
            "tokens": 0,
            "bytes": shard.bytes,
        }
