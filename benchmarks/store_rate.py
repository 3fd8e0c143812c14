"""What the store costs over the bare disk and the bare client, and bytes a token by codec.

    python benchmarks/store_rate.py --model examples/arithmetic/model

Ours and the raw operation take turns on the same bytes, each first in every other round; a ratio
is the median over rounds of raw seconds over ours. A raw put is as durable as ours: temporary
file, fsync, rename and fsync of the folder on disk, one put through the same client on S3. The
server is the tests' own, on this machine. "cold": the file's pages were dropped before each read.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pyarrow as pa

from artifacts.shards import encode, read_file, read_shard, write_file, write_shard
from artifacts.store import Store
from store_rows import rollout_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

CODECS = ["none", "lz4", "zstd 1", "zstd 3", "zstd 9"]
FOLDER = "iteration-000001/rollout/k"


def seconds_of(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_turn(
    rounds: int, ours: Callable[[], object], raw: Callable[[], object], before: Callable[[], object]
) -> tuple[float, float, float]:
    """Median seconds of ours and of raw, and the median ratio raw / ours of a round."""
    pairs = []
    for number in range(rounds + 1):
        seconds = {}
        for name in ("ours", "raw") if number % 2 else ("raw", "ours"):
            before()
            seconds[name] = seconds_of(ours if name == "ours" else raw)
        pairs.append((seconds["ours"], seconds["raw"]))
    pairs = pairs[1:]  # the first round warms both
    return (
        median(o for o, _ in pairs),
        median(r for _, r in pairs),
        median(r / o for o, r in pairs),
    )


def raw_put(store: Store, data: bytes) -> None:
    """The same bytes, as durable, without a digest."""
    where = store.locate(f"{FOLDER}/raw-{uuid.uuid4().hex}")
    if not store.is_local:
        store.fs.pipe_file(where, data)
        return
    folder = os.path.dirname(where)
    with open(f"{where}.tmp", "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{where}.tmp", where)
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def raw_read(store: Store, path: str) -> bytes:
    """The bytes, unchecked."""
    where = store.locate(path)
    if store.is_local:
        return Path(where).read_bytes()
    return store.fs.cat_file(where, max_concurrency=1)  # one request, as ours


def forget(store: Store, path: str) -> None:
    """Drop a local file's pages, so that the next read asks the disk."""
    handle = os.open(store.locate(path), os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def nothing() -> None:
    pass


def file_rates(store: Store, data: bytes, rounds: int) -> Iterator[tuple[str, float, float, float]]:
    """(what, MB/s of ours, MB/s of raw, ratio) of bytes as they are."""
    shard = write_file(store, FOLDER, "shard-00000", "arrow", data)
    path = f"{FOLDER}/{shard.name}"

    def write() -> None:
        write_file(store, FOLDER, f"shard-{uuid.uuid4().hex}", "arrow", data)

    states = {"": nothing}
    if store.is_local:
        states = {", warm": nothing, ", cold": lambda: forget(store, path)}
    cases = [("digest + commit", write, lambda: raw_put(store, data), nothing)]
    for state, before in states.items():
        verify, read = lambda: read_file(store, FOLDER, shard), lambda: raw_read(store, path)
        cases.append((f"read + verify{state}", verify, read, before))
    for what, ours, raw, before in cases:
        our_seconds, raw_seconds, ratio = in_turn(rounds, ours, raw, before)
        yield what, len(data) / 1e6 / our_seconds, len(data) / 1e6 / raw_seconds, ratio


def table_rates(store: Store, table: pa.Table, rounds: int) -> Iterator[tuple[str, float, float]]:
    """(what, MB/s of ours in Arrow bytes, ratio to the raw operation on the encoded bytes)."""
    data = encode(table)
    shard = write_shard(store, FOLDER, 0, table)
    path = f"{FOLDER}/{shard.name}"

    def write() -> None:
        write_shard(store, FOLDER, 1, table)

    def read() -> None:
        read_shard(store, FOLDER, shard)

    for what, ours, raw in (
        ("encode + digest + commit", write, lambda: raw_put(store, data)),
        ("read + verify + decode", read, lambda: raw_read(store, path)),
    ):
        seconds, _, ratio = in_turn(rounds, ours, raw, nothing)
        yield what, table.nbytes / 1e6 / seconds, ratio


def encode_as(table: pa.Table, codec: str) -> pa.Buffer:
    """``table`` as an Arrow IPC file under a codec."""
    name, _, level = codec.partition(" ")
    compression = None if name == "none" else pa.Codec(name, int(level) if level else None)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue()


def codec_rows(
    table: pa.Table, tokens: int, rounds: int
) -> Iterator[tuple[str, float, float, float]]:
    """(codec, bytes a token, encode MB/s, decode MB/s), of Arrow bytes; rounds go through all."""
    seconds: dict[str, tuple[list[float], list[float]]] = {c: ([], []) for c in CODECS}
    sizes = {}
    for _ in range(rounds + 1):
        for codec in CODECS:
            start = time.perf_counter()
            data = encode_as(table, codec)
            middle = time.perf_counter()
            # A codec of none maps its columns: touch them all, as the others do.
            pa.ipc.open_file(data).read_all().combine_chunks().validate(full=True)
            seconds[codec][0].append(middle - start)
            seconds[codec][1].append(time.perf_counter() - middle)
            sizes[codec] = data.size
    for codec, (encoding, decoding) in seconds.items():
        megabytes = table.nbytes / 1e6
        yield (
            codec,
            sizes[codec] / tokens,
            megabytes / median(encoding[1:]),
            megabytes / median(decoding[1:]),
        )


@contextlib.contextmanager
def stores(folder: Path) -> Iterator[dict[str, Store]]:
    """A store on the disk of ``folder``, and one on an S3 server that keeps its files there."""
    from s3_server import BUCKET, running_s3_server

    with running_s3_server(folder) as server:
        os.environ |= server.environment
        yield {"local": Store(str(folder / "run")), "S3": Store(f"s3://{BUCKET}/run")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder whose tokenizer is used")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--folder", help="where to write; default: the temporary folder")
    args = parser.parse_args()
    table = rollout_table(args.model, args.rows)
    tokens = sum(len(ids) for ids in table["response_ids"])
    data = encode(table)
    print(f"{args.rows} rows, {tokens:,} response tokens, {table.nbytes / 1e6:.1f} MB of Arrow,")
    print(f"{len(data) / 1e6:.1f} MB on disk; medians of {args.rounds} rounds\n")
    print("| store | bytes | what | ours MB/s | raw MB/s | ratio |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, stores(Path(folder)) as found:
        for name, store in found.items():
            for kind, content in (("shard", data), ("64 MB", os.urandom(64_000_000))):
                for what, ours, raw, ratio in file_rates(store, content, args.rounds):
                    print(f"| {name} | {kind} | {what} | {ours:,.0f} | {raw:,.0f} | {ratio:.2f} |")
            for what, ours, ratio in table_rates(store, table, args.rounds):
                print(f"| {name} | Arrow | {what} | {ours:,.0f} | | {ratio:.2f} |", flush=True)
    print("\n| codec | bytes/token | encode MB/s | decode MB/s |\n|---|---|---|---|")
    for codec, size, encoding, decoding in codec_rows(table, tokens, max(3, args.rounds // 3)):
        print(f"| {codec} | {size:.2f} | {encoding:,.0f} | {decoding:,.0f} |")


if __name__ == "__main__":
    main()
