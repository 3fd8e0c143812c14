"""Prompts: every row has tokens, and there are as many as were counted."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.invariants.columns import holds, is_whole
from artifacts.manifests import Manifest
from artifacts.store import Store


def problems(
    store: Store, folder: str, manifest: Manifest, tables: Sequence[pa.Table | None]
) -> Iterator[str]:
    """See the package's docstring."""
    table = pa.concat_tables(tables)
    lengths = pc.list_value_length(table["token_ids"])
    if not is_whole(lengths) or not holds(pc.greater(lengths, 0)):
        yield "a prompt has no tokens"
    counted = manifest.outcome.get("rows", table.num_rows)
    total = sum(counted) if isinstance(counted, list) else counted
    if total != table.num_rows:
        yield f"it has {table.num_rows} prompts, and says {total}"
