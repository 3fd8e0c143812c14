"""Who did what, when: one row a unit of work, beside a stage's shards and outside every digest."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from artifacts import schemas
from artifacts.manifests import Shard
from artifacts.shards import read_shard, write_table
from artifacts.store import Store


def write_ledger(store: Store, folder: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write ``entries`` in ``folder``; returns what a manifest's provenance keeps of it."""
    table = pa.Table.from_pylist([dict(entry) for entry in entries], schema=schemas.LEDGER)
    return vars(write_table(store, folder, "ledger", table))


def read_ledger(store: Store, folder: str, kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries that :func:`write_ledger` wrote."""
    rows: list[dict[str, Any]] = read_shard(store, folder, Shard(**kept)).to_pylist()
    return rows
