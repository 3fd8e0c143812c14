"""An iteration's samples with their rewards and advantages, as one table to look at."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.shards import read_shard, read_table
from artifacts.store import Store
from flows.session import Iteration

_SHOWN = ("sample_id", "prompt_text", "text", "ground_truth", "reward", "finish_reason", "error")
_TEXT_LIMIT = 2000


def join_iteration(store: Store, made: Iteration) -> pa.Table:
    """Rollouts, and where they are committed, scores and advantages: one row a sample."""
    if made.rollout is None:
        raise ValueError("the iteration has no committed rollout")
    table = read_table(store, made.rollout.folder, made.rollout.manifest)
    if made.scores is not None:
        scores = read_table(store, made.scores.folder, made.scores.manifest)
        table = _beside(table, scores, leave_out={"sample_id", "group_id"})
    if made.update is not None:
        (shard,) = (s for s in made.update.manifest.shards if s.name.startswith("advantages."))
        advantages = read_shard(store, made.update.folder, shard)
        table = _beside(table, advantages, leave_out={"sample_id"})
    tokens = pc.list_value_length(table["response_ids"])
    return table.append_column("tokens", tokens)


def _beside(left: pa.Table, right: pa.Table, leave_out: set[str]) -> pa.Table:
    # Every stage keeps the rollout's order; the update refuses inputs that do not.
    if left["sample_id"] != right["sample_id"]:
        raise ValueError("the two tables don't hold the same samples in the same order")
    for name in right.column_names:
        if name not in leave_out:
            left = left.append_column(right.schema.field(name), right[name])
    return left


def telling_rows(table: pa.Table, limit: int) -> dict[str, Any]:
    """Up to ``limit`` samples as MLflow's table JSON: what failed, the worst, the best, between."""
    rows = table.to_pylist()
    order = sorted(range(len(rows)), key=lambda i: _rank(rows[i]))
    if len(order) > limit:
        # Evenly over the order keeps both ends and the middle.
        order = [order[k * (len(order) - 1) // max(1, limit - 1)] for k in range(limit)]
    names = [*_SHOWN, *(n for n in table.column_names if n.startswith("reward.")), "tokens"]
    names += [name for name in ("advantage",) if name in table.column_names]
    return {"columns": names, "data": [[_cell(rows[i][n]) for n in names] for i in order]}


def _rank(row: dict[str, Any]) -> tuple[int, float]:
    reward = row["reward"]
    return (0, 0.0) if reward is None else (1, reward)


def _cell(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _TEXT_LIMIT:
        return value[:_TEXT_LIMIT] + " …"
    return value
