"""Tables and files whose name carries their digest.

``shard-00003.<sha256>.arrow`` is an Arrow IPC file, zstd-compressed, encoded in memory and
written whole. The IPC format itself notices no flipped byte, so every read checks the digest.
"""

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.ipc

from artifacts.errors import IntegrityError
from artifacts.keys import sha256
from artifacts.manifests import Manifest, Shard
from artifacts.schemas import ROWS_VERSION
from artifacts.store import Store
from artifacts.tombstones import refuse_retired

_LARGE_BYTES = 128 << 20  # a snapshot's file; a shard is one request
_NAME = re.compile(r"shard-(\d{5})\.([0-9a-f]{64})\.arrow")


def encode(table: pa.Table) -> bytes:
    """``table`` as an Arrow IPC file: built the same way, it gives the same bytes in any process.

    A slice need not give the bytes of an equal table that was built alone: it keeps some of the
    whole one's layout.
    """
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks())
    return bytes(sink.getvalue())


def write_shard(store: Store, folder: str, index: int, table: pa.Table) -> Shard:
    """Write ``table`` as shard ``index`` of ``folder``."""
    return write_table(store, folder, f"shard-{index:05d}", table)


def write_table(store: Store, folder: str, stem: str, table: pa.Table) -> Shard:
    """Write ``table`` as ``<stem>.<sha256>.arrow`` in ``folder``."""
    return write_file(store, folder, stem, "arrow", encode(table), table.num_rows)


def write_file(
    store: Store, folder: str, stem: str, suffix: str, data: bytes, rows: int = 0
) -> Shard:
    """Write ``data`` as ``<stem>.<sha256>.<suffix>`` in ``folder``."""
    with ThreadPoolExecutor(1) as pool:  # the disk waits while this thread counts
        digest = pool.submit(sha256, data)
        store.put_named(folder, lambda: f"{stem}.{digest.result()}.{suffix}", data)
    return Shard(f"{stem}.{digest.result()}.{suffix}", rows, len(data), digest.result())


def read_file(store: Store, folder: str, shard: Shard) -> bytes:
    """The bytes of ``shard``, checked.

    Raises:
        RetiredError: it was removed by ``ratchet gc``.
        IntegrityError: it is missing, or its digest is another.
    """
    return bytes(_view_file(store, folder, shard))


def _view_file(store: Store, folder: str, shard: Shard) -> memoryview:
    is_large = shard.bytes > _LARGE_BYTES
    return _read_verified(store, f"{folder}/{shard.name}", shard.digest, is_large)


def read_shard(
    store: Store, folder: str, shard: Shard, columns: Collection[str] | None = None
) -> pa.Table:
    """The table of ``shard``, checked like that of :func:`read_file`; its row count too.

    Args:
        columns: decode these alone, of those that it has; the digest is checked over all.

    Raises:
        ValueError: its rows were written by a later version of the schema.
    """
    path = f"{folder}/{shard.name}"
    table = _decode(path, _view_file(store, folder, shard), columns)
    if table.num_rows != shard.rows:
        raise IntegrityError(path, shard.rows, table.num_rows, "rows")
    return table


def read_shards(
    store: Store, folder: str, shards: Iterable[Shard], columns: Collection[str] | None = None
) -> Iterator[pa.Table]:
    """The tables of ``shards``, one after another: as :func:`read_shard` reads them."""
    return (read_shard(store, folder, shard, columns) for shard in shards)


def read_table(
    store: Store, folder: str, manifest: Manifest, columns: Collection[str] | None = None
) -> pa.Table:
    """All shards of ``manifest`` as one table: as :func:`read_shard` reads them."""
    return pa.concat_tables(read_shards(store, folder, manifest.shards, columns))


def find_shards(store: Store, folder: str, wanted: Iterable[int]) -> dict[int, Shard]:
    """Whole shards that an earlier attempt left in ``folder``, by index.

    What does not verify counts as missing and is made again under its right name. Where two
    attempts left different bytes for one index, the lower digest is taken: any choice is
    whole, and this one is the same in every process.
    """
    indices = set(wanted)
    found: dict[int, Shard] = {}
    for name in store.names(folder):
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) not in indices or int(match[1]) in found:
            continue
        path = f"{folder}/{name}"
        with contextlib.suppress(IntegrityError):
            data = _read_verified(store, path, match[2])
            rows = _decode(path, data).num_rows
            found[int(match[1])] = Shard(name, rows, len(data), match[2])
    return found


def _read_verified(store: Store, path: str, digest: str, is_large: bool = False) -> memoryview:
    try:
        data = store.view(path, is_large)
    except FileNotFoundError as error:
        # A tombstone is there before a byte goes: who misses the bytes finds it.
        folder, _, name = path.rpartition("/")
        refuse_retired(store, folder, name)
        raise IntegrityError(path, digest, "no file") from error
    found = sha256(data)
    if found != digest:
        raise IntegrityError(path, digest, f"{found} ({len(data)} bytes)")
    return data


def _decode(path: str, data: memoryview, columns: Collection[str] | None = None) -> pa.Table:
    # The stream format is refused: cut between two batches, it reads as a shorter whole table.
    try:
        reader = pa.ipc.open_file(data)
        if columns is not None:
            chosen = [n for n, name in enumerate(reader.schema.names) if name in columns]
            options = pa.ipc.IpcReadOptions(included_fields=chosen)
            reader = pa.ipc.open_file(data, options=options)
        table = reader.read_all()
    except pa.ArrowInvalid as error:
        raise IntegrityError(path, "Arrow IPC file", str(error), "format") from error
    version = (table.schema.metadata or {}).get(b"ratchet.version", b"1").decode(errors="replace")
    if not version.isdecimal():
        raise IntegrityError(path, "a number", repr(version), "version of rows")
    if int(version) > ROWS_VERSION:
        raise ValueError(
            f"{path} has rows of version {version}, and this version of Ratchet reads up to "
            f"{ROWS_VERSION}: read it with the version that wrote it"
        )
    return table
