"""Committed rollouts with texts of one's choosing, and their scoring, for tests of the stage."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from artifacts import schemas
from artifacts.manifests import Ref
from artifacts.shards import read_table, write_shard
from artifacts.store import Store
from stages.contract import Committed, Product, Work, find_or_make
from stages.score import run as stage
from stages.score.config import ScoreConfig
from stages.score.rewards import reward_digests
from stages.score.scorers import Scorers
from stages.score.worker import ScorerSpec
from stages.workers import Cluster, LocalCluster, Placement


def commit_rollout(
    store: Store,
    texts: Sequence[str],
    per_shard: int,
    truths: Sequence[str | None] | None = None,
    messages: Sequence[str | None] | None = None,
) -> Committed:
    """A rollout of ``texts``, ``per_shard`` samples a shard, two samples a group.

    ``messages`` are what a chat template has rendered, as JSON.
    """
    truths = truths or [None] * len(texts)
    rows = [_row(n, text, truth) for n, (text, truth) in enumerate(zip(texts, truths, strict=True))]
    for row, each in zip(rows, messages or [None] * len(texts), strict=True):
        row["messages"] = each
    identity = {"max_new_tokens": 64}
    work = Work("rollouts", "rollout", 1, 1, identity, {"policy": Ref("model", "0" * 64)})

    def make() -> Product:
        parts = [rows[i : i + per_shard] for i in range(0, len(rows), per_shard)]
        tables = [pa.Table.from_pylist(part, schema=schemas.ROLLOUTS) for part in parts]
        return Product([write_shard(store, work.folder, i, t) for i, t in enumerate(tables)])

    return find_or_make(store, work, make)


def _row(n: int, text: str, truth: str | None) -> dict[str, Any]:
    group = f"000001-{n // 2:05d}"
    return {
        "sample_id": f"{group}-{n % 2:03d}",
        "group_id": group,
        "prompt_id": str(n // 2),
        "source": "test",
        "row": n // 2,
        "epoch": 0,
        "sample_index": n % 2,
        "seed": n,
        "prompt_ids": [1],
        "response_ids": [4] * len(text),
        "logprobs": [-1.0] * len(text),
        "loss_mask": [1] * len(text),
        "finish_reason": "stop",
        "text": text,
        "prompt_text": f"prompt {n // 2}",
        "ground_truth": truth,
        "extra": json.dumps({"n": n}),
        "policy_version": 0,
        "policy_digest": "0" * 64,
    }


def make_scorers(
    config: ScoreConfig, cluster: Cluster | None = None, workers: int = 1, model: str = ""
) -> Scorers:
    """A pool on ``cluster``; without one, in this process."""
    spec = ScorerSpec(config.rewards, None, model, workers, cluster is None)
    return Scorers(cluster or LocalCluster(), spec, Placement(), config.retries)


def score(
    store: Store,
    config: ScoreConfig,
    rollout: Committed,
    scorers: Scorers,
    how: Callable[..., Committed] = stage.run,
    **options: Any,
) -> Committed:
    """Run the stage, or retry its errors, over ``rollout``."""
    work = stage.score_work(1, config, reward_digests(config.rewards), rollout, None)
    return how(store, work, rollout, config, lambda: scorers, lambda **_: None, **options)


def rows_of(store: Store, made: Committed) -> list[dict[str, Any]]:
    """The committed rows."""
    rows: list[dict[str, Any]] = read_table(store, made.folder, made.manifest).to_pylist()
    return rows


def reward_file(folder: Path, source: str, name: str = "rewards.py") -> str:
    """A file of reward functions; returns its path."""
    path = folder / name
    path.write_text(source)
    return str(path)
