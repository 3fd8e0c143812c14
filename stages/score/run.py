"""The score stage: rollout shards in, a score shard for each out.

What is committed never changes, so samples whose reward failed are tried again in a new commit
that names the one before it as its input ``retry_of``. These form a chain, whose end counts.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.manifests import Ref, Shard
from artifacts.schemas import usage_columns
from artifacts.shards import find_shards, read_shard, read_shards
from artifacts.store import Store
from stages.contract import Committed, Product, Progress, StageError, Work, find, find_or_make
from stages.ledger import write_ledger
from stages.score import preference
from stages.score.config import ScoreConfig, judges
from stages.score.metrics import judge_metrics, reward_metrics, spread_counts, with_totals
from stages.score.order import ShardOrder
from stages.score.scorers import Scorers, Values

VERSION = 3
_SHOWN = 3


def score_work(
    iteration: int,
    score: ScoreConfig,
    functions: Mapping[str, str],
    rollout: Committed,
    reference: Mapping[str, Any] | None,
    critic: tuple[Ref, Mapping[str, Any]] | None = None,
) -> Work:
    """The description of an iteration's scoring.

    Args:
        functions: reward column to source digest.
        reference: digest, dtype and temperature of the reference pass; None for none.
        critic: what made the critic whose values are wanted, and its digest, version and dtype;
            None for no values.
    """
    identity = {
        "rewards": [spec.identity() for spec in score.rewards] or [preference.IDENTITY],
        "reference": None if reference is None else dict(reference),
    }
    inputs = {"rollout": rollout.ref}
    if critic is not None:  # nothing of it is in the key of scores without one
        inputs["critic"], identity["critic"] = critic[0], dict(critic[1])
    return Work("scores", "score", VERSION, iteration, identity, inputs, functions)


def find_scores(store: Store, work: Work) -> Committed | None:
    """The committed scores of ``work``: where errors were tried again, the newest retry's."""
    found = find(store, work)
    while found is not None and _has_errors(found):
        retried = find(store, _retry_work(work, found))
        if retried is None:
            break
        found = retried
    return found


def run(
    store: Store,
    work: Work,
    rollout: Committed,
    config: ScoreConfig,
    scorers: Callable[[], Scorers],
    progress: Progress,
    critic: Callable[[], Values] | None = None,
) -> Committed:
    """Score the rollout's shards. ``scorers`` and ``critic``, where values are wanted, are called
    only where something is missing.

    Raises:
        StageError: more samples failed than ``config.max_error_share``, or one has no reward and
            ``config.on_null`` is fail. Shards without an error are kept for the next attempt.
    """
    if found := find_scores(store, work):
        return found
    orders = [ShardOrder(n, shard) for n, shard in enumerate(rollout.manifest.shards)]
    return find_or_make(
        store, work, lambda: _make(store, work, rollout, orders, config, scorers, progress, critic)
    )


def retry_errors(
    store: Store,
    work: Work,
    rollout: Committed,
    config: ScoreConfig,
    scorers: Callable[[], Scorers],
    progress: Progress,
) -> Committed:
    """Score again those samples of committed scores that have an error, and commit beside them.

    All rewards of such a sample are called again; a batched one with these samples alone. Its
    values stay as they are.

    Raises:
        StageError: there are no scores; or as :func:`run`.
    """
    earlier = find_scores(store, work)
    if earlier is None:
        raise StageError(f"iteration {work.iteration} has no committed scores: score it first")
    if not _has_errors(earlier):
        return earlier
    pairs = zip(rollout.manifest.shards, earlier.manifest.shards, strict=True)
    orders = [ShardOrder(n, r, (earlier.folder, e)) for n, (r, e) in enumerate(pairs)]
    again = _retry_work(work, earlier)
    return find_or_make(
        store, again, lambda: _make(store, again, rollout, orders, config, scorers, progress)
    )


def _has_errors(scores: Committed) -> bool:
    # Nothing is retried without errors, so without them no retry need be looked for.
    return scores.manifest.metrics.get("score/error_share", 0) != 0


def _retry_work(work: Work, earlier: Committed) -> Work:
    return replace(work, inputs={**work.inputs, "retry_of": earlier.ref})


def _make(
    store: Store,
    work: Work,
    rollout: Committed,
    orders: Sequence[ShardOrder],
    config: ScoreConfig,
    scorers: Callable[[], Scorers],
    progress: Progress,
    critic: Callable[[], Values] | None = None,
) -> Product:
    total = rollout.manifest.rows
    shards = find_shards(store, work.folder, range(len(orders)))
    missing = [order for order in orders if order.index not in shards]
    num_found = len(shards)
    progress(total=sum(order.rollout.rows for order in missing), found=num_found)
    entries: list[Mapping[str, Any]] = []
    errors = sum(_num_errors(store, work.folder, shard) for shard in shards.values())
    if errors > config.max_error_share * total:
        raise _too_many_errors(store, work.folder, shards, config, total)
    if missing:
        pool, values = scorers(), None if critic is None else critic()
        for event in pool.score(store, rollout.folder, work.folder, missing, values):
            shards[event.index] = event.shard
            entries += event.entries
            errors += event.errors
            progress(shard=event.index, rows=event.shard.rows, samples=event.shard.rows)
            if errors > config.max_error_share * total:
                pool.drop()
                raise _too_many_errors(store, work.folder, shards, config, total)
    whole = _all_of(orders, shards)
    parts = read_shards(store, work.folder, whole, _per_sample(config))
    table = pa.concat_tables(with_totals(part) for part in parts)
    if config.on_null == "fail" and table["reward"].null_count:
        raise _nulls(store, work.folder, shards, table)
    provenance = {
        "ledger": write_ledger(store, work.folder, entries),
        "made": len(missing),
        "found": num_found,
        "workers_lost": sum(entry["attempt"] - 1 for entry in entries),
    }
    outcome = {"groups_with_spread": spread_counts(table)}
    metrics = {**reward_metrics(table), **judge_metrics(table, judges(config.rewards))}
    return Product(whole, outcome, metrics, provenance)


def _all_of(orders: Sequence[ShardOrder], shards: Mapping[int, Shard]) -> list[Shard]:
    for order in orders:
        rows = shards[order.index].rows if order.index in shards else 0
        if rows != order.rollout.rows:
            raise StageError(
                f"score shard {order.index}: expected {order.rollout.rows} rows, found {rows}"
            )
    return [shards[order.index] for order in orders]


def _per_sample(config: ScoreConfig) -> list[str]:
    """The columns with a value a sample: others are summed up shard by shard."""
    names = [spec.column for spec in config.rewards] or [preference.COLUMN]
    components = [f"reward.{name}" for name in names]
    usages = [name for spec in judges(config.rewards) for name in usage_columns(spec.column)]
    return ["sample_id", "group_id", "reward", "error", "token_rewards", *components, *usages]


def _num_errors(store: Store, folder: str, shard: Shard) -> int:
    errors = read_shard(store, folder, shard, ["error"])["error"]
    return len(errors) - int(errors.null_count)


def _too_many_errors(
    store: Store, folder: str, shards: Mapping[int, Shard], config: ScoreConfig, total: int
) -> StageError:
    """The error to raise: which functions failed, how often, and the first samples' errors."""
    table = _errors_of(store, folder, shards)
    rows = table.filter(pc.is_valid(table["error"])).to_pylist()
    records = [record for row in rows for record in json.loads(row["error"])]
    counts = Counter(record["function"] for record in records)
    _forget_errors(store, folder, shards)
    failed = ", ".join(f"{name} on {count}" for name, count in counts.most_common())
    return StageError(
        f"scoring stopped with errors in {len(rows)} of {total} samples, more than "
        f"score.max_error_share {config.max_error_share:g}: {failed}; first: "
        + "; ".join(_explain(row) for row in rows[:_SHOWN])
    )


def _nulls(store: Store, folder: str, shards: Mapping[int, Shard], scores: pa.Table) -> StageError:
    """The error to raise where a reward is null and may not be, with the first three."""
    rows = scores.filter(pc.is_null(scores["reward"])).to_pylist()
    _forget_errors(store, folder, shards)
    shown = "; ".join(_explain(row) for row in rows[:_SHOWN])
    return StageError(
        f"{len(rows)} of {scores.num_rows} samples have no reward, and score.on_null is fail: "
        f"{shown}"
    )


def _explain(row: Mapping[str, Any]) -> str:
    if row["error"] is None:
        return f"sample {row['sample_id']}: a reward abstained"
    first = json.loads(row["error"])[0]
    where = f" ({first['traceback'][-1]})" if first["traceback"] else ""
    return (
        f"sample {row['sample_id']}: {first['function']} raised {first['type']}: "
        f"{first['message']}{where}"
    )


def _forget_errors(store: Store, folder: str, shards: Mapping[int, Shard]) -> None:
    """Remove uncommitted shards that hold an error: the next attempt is to call it anew."""
    for shard in shards.values():
        if _num_errors(store, folder, shard):
            store.remove(f"{folder}/{shard.name}")


def _errors_of(store: Store, folder: str, shards: Mapping[int, Shard]) -> pa.Table:
    columns = ["sample_id", "error"]
    whole = [shards[index] for index in sorted(shards)]
    return pa.concat_tables(read_shards(store, folder, whole, columns))
