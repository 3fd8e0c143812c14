"""An iteration's samples with their rewards and advantages, as one table to look at."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.shards import read_shard, read_table
from artifacts.store import Store
from flows.iteration import Iteration, Round

# What a reader compares stands together: they see four or five columns at once.
_SHOWN = ("reward", "prompt_text", "text", "ground_truth", "advantage", "tokens", "finish_reason")
_TEXT_LIMIT = 2000


def join_iteration(store: Store, made: Iteration) -> pa.Table:
    """Rollouts, and where they are committed, scores and advantages: one row a sample.

    Rounds follow each other. Of one that is not scored yet, those columns are null.
    """
    if not made.rounds:
        raise ValueError("the iteration has no committed rollout")
    rounds = [join_round(store, each, number) for number, each in enumerate(made.rounds, start=1)]
    table = pa.concat_tables(rounds, promote_options="default")
    if made.update is not None:
        (shard,) = (s for s in made.update.manifest.shards if s.name.startswith("advantages."))
        advantages = read_shard(store, made.update.folder, shard)
        table = _beside(table, advantages, leave_out={"sample_id"})
    return table


def join_round(store: Store, made: Round, number: int) -> pa.Table:
    """A rollout's samples, and where they are scored, their scores: one row a sample."""
    table = read_table(store, made.rollout.folder, made.rollout.manifest)
    table = table.append_column("round", pa.repeat(pa.scalar(number, pa.int32()), table.num_rows))
    if made.scores is not None:
        scores = read_table(store, made.scores.folder, made.scores.manifest)
        table = _beside(table, scores, leave_out={"sample_id", "group_id"})
    return table.append_column("tokens", pc.list_value_length(table["response_ids"]))


def _beside(left: pa.Table, right: pa.Table, leave_out: set[str]) -> pa.Table:
    # Every stage keeps the rollout's order; the update refuses inputs that do not.
    if left["sample_id"] != right["sample_id"]:
        raise ValueError("the two tables don't hold the same samples in the same order")
    for name in right.column_names:
        if name not in leave_out:
            left = left.append_column(right.schema.field(name), right[name])
    return left


def telling_rows(table: pa.Table, limit: int) -> dict[str, Any]:
    """Up to ``limit`` samples as MLflow's table JSON: those without a reward, then worst to best.

    Where there are more, they are taken evenly over that order: both ends and the middle.
    """
    rewards = table["reward"].to_pylist()
    order = sorted(range(len(rewards)), key=lambda i: (rewards[i] is not None, rewards[i] or 0.0))
    if len(order) > limit:
        order = [order[k * (len(order) - 1) // max(1, limit - 1)] for k in range(limit)]
    rows = table.select(shown_columns(table)).take(order)
    data = [[_cell(value) for value in row.values()] for row in rows.to_pylist()]
    return {"columns": rows.column_names, "data": data}


def shown_columns(table: pa.Table) -> list[str]:
    """The columns that a person reads, in reading order."""
    components = [name for name in table.column_names if name.startswith("reward.")]
    names = [*_SHOWN, *(components if len(components) > 1 else []), "error", "sample_id"]
    return [name for name in names if name in table.column_names]


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, str) and len(value) > _TEXT_LIMIT:
        return value[:_TEXT_LIMIT] + " …"
    return value
