"""A user's data file, row by row: JSON lines or Parquet, at any fsspec URL."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow.parquet as pq

from artifacts.door import explaining
from artifacts.keys import key_of, sha256
from artifacts.store import filesystem
from stages.rollout.config import DataConfig, DataSource
from stages.rollout.pairs import Pair, read_pair


@dataclass(frozen=True)
class Row:
    """One data row. ``place`` names it to a person: file and line; ``pair``: given responses."""

    number: int
    place: str
    prompt: str | list[dict[str, Any]]
    answer: str | None
    extra: dict[str, Any]
    digest: str
    pair: Pair | None = None


def data_digest(data: DataConfig) -> str:
    """Digest of the bytes of all data files. Raises ValueError where one isn't there."""
    digests = [_file_digest(source.path) for source in data.all_sources]
    return digests[0] if len(digests) == 1 else key_of(digests)


def _file_digest(location: str) -> str:
    fs, path = filesystem(location)
    with explaining("read", location):
        if not fs.isfile(path):
            raise ValueError(f"data.path is {location!r}, and there is no such file: check it")
        return sha256(fs.cat_file(path))


def check_rows(data: DataConfig, count: int = 64) -> None:
    """Read ``count`` rows of each source, to find a wrong column before anything heavy loads."""
    for source in data.all_sources:
        for _ in islice(read_rows(source, data.template), count):
            pass


def read_rows(source: DataSource, template: str) -> Iterator[Row]:
    """The rows of ``source``, in order.

    Raises:
        ValueError: a row can't be used; the message says which and why.
    """
    for number, (place, record) in enumerate(_records(source.path)):
        yield _row(number, place, record, source, template)


def _records(location: str) -> Iterator[tuple[str, Any]]:
    fs, path = filesystem(location)
    if path.endswith(".parquet"):
        with fs.open(path, "rb") as file:
            batches = pq.ParquetFile(file).iter_batches()
            records = (record for batch in batches for record in batch.to_pylist())
            for number, record in enumerate(records):
                yield f"{location}, row {number}", record
        return
    with fs.open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{location}, line {number}"
            try:
                yield place, json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{place} is not JSON ({error}): write one object a line"
                ) from None


def _row(number: int, place: str, record: Any, data: DataSource, template: str) -> Row:
    if not isinstance(record, dict):
        raise ValueError(f"{place} holds a {type(record).__name__}: write one object a line")
    for key in ("prompt", "answer", "chosen", "rejected"):
        column = getattr(data, key)
        if column is not None and column not in record:
            have = ", ".join(sorted(map(str, record)))
            raise ValueError(
                f"{place} has no column {column!r}, which data.{key} names; it has {have}"
            )
    prompt = record[data.prompt]
    if not prompt or not isinstance(prompt, str | list):
        raise ValueError(f"{place}: column {data.prompt!r} is {prompt!r}, not a text or messages")
    if template == "plain" and not isinstance(prompt, str):
        raise ValueError(f"{place}: messages need a chat template: set data.template=chat")
    answer = record[data.answer] if data.answer is not None else None
    extra = {k: v for k, v in record.items() if k not in data.columns}
    text = answer if answer is None or isinstance(answer, str) else json.dumps(answer)
    pair = read_pair(place, record, data, template)
    return Row(number, place, prompt, text, extra, key_of({"row": _stable(record)}), pair)


def _stable(record: Any) -> Any:
    # Through JSON, so that a date or a NaN in a column has bytes too.
    return json.dumps(record, sort_keys=True, ensure_ascii=False, default=str)
