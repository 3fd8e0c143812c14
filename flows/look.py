"""``ratchet samples``: rollouts of an iteration, filtered and sorted with SQL."""

import json
from typing import Any

import duckdb
import pyarrow as pa

from artifacts.runs import committed, iterations
from artifacts.store import Store
from flows.config import UserError
from flows.samples import join_iteration
from flows.session import Iteration
from flows.tables import print_table
from stages.contract import Committed

_SHOWN = ("sample_id", "reward", "tokens", "finish_reason", "prompt_text", "text", "ground_truth")


def print_samples(
    url: str, iteration: int | None, where: str | None, sort: str | None, limit: int, as_json: bool
) -> None:
    """Print rows of an iteration's samples; ``where`` and ``sort`` are SQL over the columns."""
    store = Store(url)
    table = query(_iteration_table(store, url, iteration), where, sort, limit)
    if as_json:
        print(json.dumps(table.to_pylist(), indent=1, ensure_ascii=False))
        return
    names = [name for name in _SHOWN if name in table.column_names]
    names += [name for name in ("advantage", "error") if name in table.column_names]
    print_table(names, [[_text(row[name]) for name in names] for row in table.to_pylist()])


def query(table: pa.Table, where: str | None, sort: str | None, limit: int) -> pa.Table:
    """Rows of ``table``, by SQL. Raises UserError with DuckDB's own words."""
    statement = "SELECT * FROM samples"
    statement += f" WHERE {where}" if where else ""
    statement += f" ORDER BY {sort}" if sort else ""
    connection = duckdb.connect()
    connection.register("samples", table)
    try:
        return connection.execute(f"{statement} LIMIT {limit}").to_arrow_table()
    except duckdb.Error as error:
        columns = ", ".join(table.column_names)
        raise UserError(f"{str(error).splitlines()[0]}; the columns are {columns}") from None


def _iteration_table(store: Store, url: str, iteration: int | None) -> pa.Table:
    found = iterations(store)
    if not found:
        raise UserError(f"there is no rollout at {url!r}: give the folder or URL of a run")
    wanted = found if iteration is None else [iteration]
    for number in reversed(wanted):
        made = Iteration(*(_newest(store, number, s) for s in ("rollout", "score", "update")))
        if made.rollout is not None:
            return join_iteration(store, made)
    raise UserError(f"iteration {wanted[-1]} has no committed rollout; the newest is {found[-1]}")


def _newest(store: Store, iteration: int, stage: str) -> Committed | None:
    found = committed(store, iteration, stage)
    return Committed(*found[-1], was_reused=True) if found else None


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
