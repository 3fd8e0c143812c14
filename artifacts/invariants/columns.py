"""Questions that invariants ask of columns. A null is no answer: it passes, unless it is asked."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

Column = Any  # a pyarrow array, chunked or not


def holds(mask: Column) -> bool:
    """Whether every entry that is not null is true; so of no entries."""
    return bool(pc.all(mask, min_count=0).as_py())


def values(column: Column) -> Column:
    """The numbers of ``column``, those in its lists one after another."""
    return pc.list_flatten(column) if pa.types.is_list(column.type) else column


def is_finite(column: Column) -> bool:
    """Whether no number is NaN or infinite."""
    return holds(pc.is_finite(values(column)))


def is_at_most(column: Column, limit: float) -> bool:
    """Whether no number is above ``limit``."""
    return holds(pc.less_equal(values(column), limit))


def is_among(column: Column, allowed: list[Any]) -> bool:
    """Whether every value is one of ``allowed``; a null is none of them."""
    found = values(column)
    return holds(pc.is_in(found, pa.array(allowed, found.type)))


def fits(column: Column, others: Column) -> bool:
    """Whether each list has as many entries as the one of ``others``, where neither is null."""
    return holds(pc.equal(pc.list_value_length(column), pc.list_value_length(others)))


def is_whole(column: Column) -> bool:
    """Whether there is no null."""
    return bool(column.null_count == 0)


def has_doubles(column: Column) -> bool:
    """Whether a value stands twice."""
    return len(pc.unique(column)) != len(column)


def distinct(column: Column) -> list[Any]:
    """The different values, in order of size."""
    return sorted(pc.unique(pc.drop_null(column)).to_pylist())
