"""Who did what, when: one row a unit of work, beside a stage's shards and outside every digest."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from artifacts import schemas
from artifacts.errors import IntegrityError
from artifacts.manifests import shard_of
from artifacts.shards import read_shard, write_table
from artifacts.store import Store


def write_ledger(store: Store, folder: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write ``entries`` in ``folder``; returns what a manifest's provenance keeps of it."""
    table = pa.Table.from_pylist([dict(entry) for entry in entries], schema=schemas.LEDGER)
    return vars(write_table(store, folder, "ledger", table))


def read_ledger(store: Store, folder: str, kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries that :func:`write_ledger` wrote.

    Raises:
        IntegrityError: ``kept``, which stands outside every digest, is not what it returned.
    """
    try:
        shard = shard_of(kept)
    except (ValueError, TypeError) as error:
        raise IntegrityError(
            f"{folder}/manifest.json", "a ledger", str(error), "content"
        ) from error
    rows: list[dict[str, Any]] = read_shard(store, folder, shard).to_pylist()
    return rows
