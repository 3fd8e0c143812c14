"""Scores: what counts is finite or null, and each row belongs to the rollout's row at its place."""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from artifacts.invariants.columns import fits, is_at_most, is_finite
from artifacts.invariants.inputs import table_of
from artifacts.manifests import Manifest
from artifacts.store import Store

_OF_A_TOKEN = ("reference_logprobs", "token_rewards", "values")


def problems(
    store: Store, folder: str, manifest: Manifest, tables: Sequence[pa.Table | None]
) -> Iterator[str]:
    """See the package's docstring."""
    table = pa.concat_tables(tables)
    for name in table.column_names:
        if name.startswith("reward") or name in ("token_rewards", "values"):
            yield from _number_problems(name, table[name])
    reference = table["reference_logprobs"]
    if not is_finite(reference):
        yield "reference_logprobs holds NaN or an infinity"
    elif not is_at_most(reference, 0.0):
        yield "reference_logprobs holds a number above 0"
    rollout = table_of(store, manifest.inputs.get("rollout"))
    if rollout is not None:
        yield from _join_problems(rollout, table)


def _number_problems(name: str, numbers: pa.ChunkedArray) -> Iterator[str]:
    """What no reward and no value of column ``name`` may be."""
    if not is_finite(numbers):
        yield f"{name} holds NaN or an infinity"


def _join_problems(rollout: pa.Table, table: pa.Table) -> Iterator[str]:
    if rollout["sample_id"] != table["sample_id"]:
        yield "its samples are not those of its rollout, in order"
        return
    if rollout["group_id"] != table["group_id"]:
        yield "its groups are not those of its rollout"
    for name in _OF_A_TOKEN:
        if name in table.column_names and not fits(table[name], rollout["response_ids"]):
            yield f"{name} has not one entry a response token"
