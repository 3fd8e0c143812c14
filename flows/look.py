"""``ratchet samples``: rollouts of an iteration, filtered and sorted with SQL."""

import json
import math
from typing import Any

import duckdb
import pyarrow as pa

from artifacts.branches import open_store
from artifacts.runs import iterations
from artifacts.store import Store
from flows.config import UserError
from flows.evaluations import evaluation_samples
from flows.iteration import read_iteration
from flows.samples import join_iteration, shown_columns
from flows.tables import fits, print_block, print_table

_TEXTS = {"prompt_text": "prompt", "text": "response", "ground_truth": "truth", "error": "error"}
_TEXT_LIMIT = 1200


def print_samples(
    url: str,
    iteration: int | None,
    where: str | None,
    sort: str | None,
    limit: int,
    as_json: bool,
    evaluation: int | None = None,
) -> None:
    """Print rows of an iteration's samples, or of the newest ``evaluation`` of a policy.

    ``where`` and ``sort`` are SQL over the columns.
    """
    store = open_store(url)
    if evaluation is None:
        number, whole = _iteration_table(store, url, iteration)
        of = f"iteration {number}"
    elif iteration is None:
        whole, of = evaluation_samples(store, evaluation), f"evaluation of policy {evaluation}"
    else:
        raise UserError("--iteration and --evaluation are of different samples: give one")
    table = query(whole, where, sort, limit)
    if as_json:
        print(json.dumps(_plain(table.to_pylist()), indent=1, ensure_ascii=False))
        return
    _print(table)
    print(f"\n{of}: {table.num_rows} of {whole.num_rows} samples")


def _print(table: pa.Table) -> None:
    """As a table where a sample is a line, else as a block a sample."""
    names = [name for name in shown_columns(table) if name != "error" or _any(table["error"])]
    rows = table.select(names).to_pylist()
    cells = [[_text(row[name]) for name in names] for row in rows]
    if fits(names, cells):
        print_table(names, cells, texts=_TEXTS)
    else:
        for row in rows:
            _print_sample(row)


def query(table: pa.Table, where: str | None, sort: str | None, limit: int) -> pa.Table:
    """Rows of ``table``, by SQL. Raises UserError with DuckDB's own words."""
    statement = "SELECT * FROM samples"
    statement += f" WHERE {where}" if where else ""
    statement += f" ORDER BY {sort}" if sort else ""
    connection = duckdb.connect()
    connection.register("samples", table)
    try:
        return connection.sql(f"{statement} LIMIT {limit}").to_arrow_table()
    except duckdb.Error as error:
        columns = ", ".join(f'"{n}"' if "." in n else n for n in table.column_names)
        raise UserError(f"{str(error).splitlines()[0]}; the columns are {columns}") from None


def _iteration_table(store: Store, url: str, iteration: int | None) -> tuple[int, pa.Table]:
    found = iterations(store)
    if not found:
        raise UserError(f"there is no rollout at {url!r}: give the folder or URL of a run")
    wanted = found if iteration is None else [iteration]
    for number in reversed(wanted):
        made = read_iteration(store, number)
        if made.rounds:
            return number, join_iteration(store, made)
    raise UserError(f"iteration {wanted[-1]} has no committed rollout; the newest is {found[-1]}")


def _print_sample(row: dict[str, Any]) -> None:
    facts = {name: value for name, value in row.items() if name not in _TEXTS}
    name = facts.pop("sample_id")
    facts["finish"] = facts.pop("finish_reason")
    heading = "  ".join([name, *(f"{fact} {_text(value)}" for fact, value in facts.items())])
    texts = [(label, row.get(column)) for column, label in _TEXTS.items()]
    print_block(heading, [(label, _cut(text)) for label, text in texts if text is not None])


def _cut(text: str) -> str:
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]} … ({left_out} characters; --json has all) … {text[-half:]}"


def _any(column: pa.ChunkedArray) -> bool:
    return bool(column.null_count < len(column))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    # JSON has no NaN; what isn't finite reads as null.
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value
