"""Tables and blocks for a terminal."""

import shutil
from collections.abc import Container, Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# A column at most this wide is never broken: words and numbers stay whole.
_WHOLE = 18
_GAP = 2


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], texts: Container[str] = ()
) -> None:
    """Print ``rows`` under ``columns``; numbers go right, long text wraps in its own column.

    ``texts`` are columns that stay left, even where what they hold looks like numbers.
    """
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, _GAP, 0, 0))
    rows = [[_visible(cell) for cell in row] for row in rows]
    widths = _widths(columns, rows)
    # A row too long for the terminal is the terminal's to wrap, never ours to cut.
    least = sum(min(width, _WHOLE) + _GAP for width in widths) - _GAP
    for index, name in enumerate(columns):
        is_number = name not in texts and all(_is_number(row[index]) for row in rows)
        table.add_column(
            name,
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=widths[index] <= _WHOLE,
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    _console(least).print(table)


def fits(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether every row of a table would be one line of this terminal."""
    if any("\n" in cell for row in rows for cell in row):
        return False
    return sum(width + _GAP for width in _widths(columns, rows)) - _GAP <= _console().width


def print_block(heading: str, texts: Iterable[tuple[str, str]]) -> None:
    """Print a heading, and under it named texts of any length."""
    console = _console()
    console.print(Text(heading, style="bold"))
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in texts:
        table.add_row(name, Text(_visible(text)))
    console.print(Padding(table, (0, 0, 1, 2)))


def _console(least: int = 0) -> Console:
    # Rich takes 80 columns for a pipe; COLUMNS, where it is set, is what the reader has.
    return Console(width=max(least, shutil.get_terminal_size((100, 24)).columns), highlight=False)


def _visible(text: str) -> str:
    # What a model wrote may hold escape sequences; a terminal would obey them.
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    cells = [columns, *rows]
    return [max(Text(row[i]).cell_len for row in cells) for i in range(len(columns))]


def _is_number(text: str) -> bool:
    digits = text.removesuffix(" s").replace(",", "").replace(".", "").lstrip("-")
    return text in ("", "-", "…") or digits.isdigit()
