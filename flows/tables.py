"""Tables for a terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print ``rows`` under ``columns``; numbers go right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    rows = [list(row) for row in rows]
    for index, name in enumerate(columns):
        is_number = all(_is_number(row[index]) for row in rows)
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _is_number(text: str) -> bool:
    return text in ("", "-") or text.replace(",", "").replace(".", "").lstrip("-").isdigit()
