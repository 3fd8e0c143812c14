"""Folders that are made whole or not at all, shared by the examples' prepare scripts.

A folder is filled under a temporary name beside its place and renamed into it, with the settings
it was made with in `prepared.json`. What is in the folder is the scripts' affair.

Invariant: a folder that holds `prepared.json` is complete and was made with those settings.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

RECORD = "prepared.json"


def make_folder(folder: Path, settings: dict, fill: Callable[[Path], None]) -> bool:
    """Make `folder` by `fill(path)`; return False, untouched, if these settings made it before.

    A folder made with other settings is replaced. One that this function did not make is not:
    that raises FileExistsError.
    """
    if folder.exists() and not (folder / RECORD).is_file():
        raise FileExistsError(f"{folder} was not made by this script: move it away, or use --to")
    if folder.exists() and json.loads((folder / RECORD).read_text()) == settings:
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        fill(made)
        (made / RECORD).write_text(json.dumps(settings, indent=1) + "\n")
        if folder.exists():
            folder.rename(Path(scratch) / "replaced")
        made.rename(folder)
    return True


def make_and_report(folder: Path, settings: dict, fill: Callable[[Path], None]) -> None:
    """`make_folder`, and a line that says what it did."""
    start = time.monotonic()
    is_new = make_folder(folder, settings, fill)
    what = f"made in {time.monotonic() - start:.1f} s" if is_new else "there already"
    print(f"{folder}: {what}")


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """One JSON object a line, UTF-8."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
