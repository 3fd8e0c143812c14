"""Prompts: every row has tokens, given responses too, and there are as many as were counted."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.invariants.columns import holds, is_whole
from artifacts.manifests import Manifest
from artifacts.store import Store

_TOKENS = {
    "token_ids": "prompt",
    "chosen_ids": "chosen response",
    "rejected_ids": "rejected response",
}


def problems(
    store: Store, folder: str, manifest: Manifest, tables: Sequence[pa.Table | None]
) -> Iterator[str]:
    """See the package's docstring."""
    table = pa.concat_tables(tables)
    for name, what in _TOKENS.items():
        if name in table.column_names:
            lengths = pc.list_value_length(table[name])
            if not is_whole(lengths) or not holds(pc.greater(lengths, 0)):
                yield f"a {what} has no tokens"
    counted = manifest.outcome.get("rows", table.num_rows)
    total = sum(counted) if isinstance(counted, list) else counted
    if total != table.num_rows:
        yield f"it has {table.num_rows} prompts, and says {total}"
