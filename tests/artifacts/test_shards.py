"""Shards: what was written comes back, or an error says which file is not what it should be."""

import math
import pickle

import pyarrow as pa
import pytest

from artifacts import schemas
from artifacts.errors import IntegrityError
from artifacts.keys import sha256
from artifacts.manifests import Manifest, Shard
from artifacts.shards import (
    encode,
    find_shards,
    read_file,
    read_shard,
    read_table,
    write_file,
    write_shard,
    write_table,
)
from artifacts.store import Store
from child import run_child

FOLDER = "iteration-000001/rollout/abc"


def rollouts(first: int, count: int) -> pa.Table:
    """Rows with the values that formats lose: nulls, empty lists, infinities, other alphabets."""
    rows = [
        {
            "sample_id": f"s{number}",
            "seed": 2**62 - number,
            "response_ids": list(range(number % 4)),
            "logprobs": [-0.1 * number, -math.inf, 1e-30][: number % 4],
            "text": None if number % 3 else f"№{number} ☃",
        }
        for number in range(first, first + count)
    ]
    return pa.Table.from_pylist(rows, schema=schemas.ROLLOUTS)


def manifest_of(shards: list[Shard]) -> Manifest:
    return Manifest("rollouts", "rollout", 1, "0" * 64, {}, {}, {}, tuple(shards))


def broken(data: bytes, how: str) -> bytes:
    middle = len(data) // 2
    if how == "flipped":
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    return {"cut": data[:middle], "emptied": b"", "longer": data + b"\0"}[how]


def test_shard_written_then_read_is_the_same_table(store: Store) -> None:
    table = rollouts(0, 50)
    shard = write_shard(store, FOLDER, 3, table)
    found = read_shard(store, FOLDER, shard)
    assert found.equals(table, check_metadata=True)
    data = store.read(f"{FOLDER}/{shard.name}")
    assert shard == Shard(f"shard-00003.{sha256(data)}.arrow", 50, len(data), sha256(data))


def test_shard_read_by_columns_has_these_alone_and_is_checked_whole(store: Store) -> None:
    table = rollouts(0, 50)
    shard = write_shard(store, FOLDER, 0, table)
    columns = {"seed", "logprobs", "of_a_later_version"}
    found = read_shard(store, FOLDER, shard, columns)
    assert found.equals(table.select(["seed", "logprobs"]), check_metadata=True)
    path = f"{FOLDER}/{shard.name}"
    store.put(path, broken(store.read(path), "flipped"))
    for none_or_one in ({"seed"}, set()):
        with pytest.raises(IntegrityError, match=shard.digest):
            read_shard(store, FOLDER, shard, none_or_one)


def test_shard_without_rows_comes_back_without_rows(store: Store) -> None:
    shard = write_table(store, FOLDER, "ledger", schemas.LEDGER.empty_table())
    assert read_shard(store, FOLDER, shard).equals(schemas.LEDGER.empty_table())


def test_shards_of_a_manifest_read_as_one_table_in_its_order(store: Store) -> None:
    shards = [write_shard(store, FOLDER, i, rollouts(10 * i, 10)) for i in range(4)]
    assert read_table(store, FOLDER, manifest_of(shards)).equals(rollouts(0, 40))
    backwards = read_table(store, FOLDER, manifest_of(shards[::-1]))
    assert backwards["sample_id"][0].as_py() == "s30"


ENCODER = """
import sys
import pyarrow as pa
from artifacts import schemas
from artifacts.keys import sha256
from artifacts.shards import encode
rows = [{"sample_id": f"s{i}", "logprobs": [0.1 * i] * (i % 5), "text": "x" * i} for i in range(99)]
print(sha256(encode(pa.Table.from_pylist(rows, schema=schemas.ROLLOUTS))))
"""


def test_shard_of_the_same_table_in_two_processes_has_the_same_bytes() -> None:
    digests = {run_child(ENCODER, PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert len(digests) == 1


def test_shard_of_a_table_in_chunks_has_the_bytes_of_the_whole_one() -> None:
    chunks = pa.concat_tables([rollouts(0, 7), rollouts(7, 13)])
    assert encode(chunks) == encode(rollouts(0, 20))


@pytest.mark.parametrize("how", ["flipped", "cut", "emptied", "longer"])
def test_shard_with_other_bytes_is_refused_by_name_and_digest(store: Store, how: str) -> None:
    shard = write_shard(store, FOLDER, 0, rollouts(0, 40))
    path = f"{FOLDER}/{shard.name}"
    data = broken(store.read(path), how)
    store.put(path, data)
    for read in (read_shard, read_file):
        with pytest.raises(IntegrityError) as caught:
            read(store, FOLDER, shard)
        assert (caught.value.path, caught.value.expected) == (path, shard.digest)
        for part in (path, shard.digest, sha256(data)):
            assert part in str(caught.value)


def test_shard_with_any_single_byte_flipped_is_refused() -> None:
    store = Store("memory://flips")
    shard = write_shard(store, FOLDER, 0, rollouts(0, 3))
    path = f"{FOLDER}/{shard.name}"
    data = store.read(path)
    for place in range(0, len(data), 37):
        store.put(path, data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
        with pytest.raises(IntegrityError, match="digest"):
            read_shard(store, FOLDER, shard)


def test_shard_that_is_missing_is_refused_by_name(store: Store) -> None:
    shards = [write_shard(store, FOLDER, i, rollouts(10 * i, 10)) for i in range(3)]
    store.remove(f"{FOLDER}/{shards[1].name}")
    with pytest.raises(IntegrityError, match="no file") as caught:
        read_table(store, FOLDER, manifest_of(shards))
    assert shards[1].name in str(caught.value)
    assert shards[1].digest in str(caught.value)


def test_shard_with_fewer_rows_than_its_manifest_is_refused(store: Store) -> None:
    written = write_shard(store, FOLDER, 0, rollouts(0, 20))
    claimed = Shard(written.name, 40, written.bytes, written.digest)
    with pytest.raises(IntegrityError, match=r"expected rows 40, found 20"):
        read_table(store, FOLDER, manifest_of([claimed]))


def stream_of(batches: int, kept: int) -> bytes:
    """A file of the stream format, of ``batches`` times 10 rows, cut after ``kept`` of them."""
    sink = pa.BufferOutputStream()
    ends = []
    with pa.ipc.new_stream(sink, schemas.ROLLOUTS) as writer:
        for number in range(batches):
            writer.write_table(rollouts(10 * number, 10))
            ends.append(sink.tell())
    return bytes(sink.getvalue())[: ends[kept - 1]]


@pytest.mark.parametrize("kept", [2, 4])
def test_shard_in_stream_format_is_refused_whole_or_cut(store: Store, kept: int) -> None:
    data = stream_of(4, kept)
    assert pa.ipc.open_stream(data).read_all().num_rows == 10 * kept  # no error, only fewer rows
    shard = write_file(store, FOLDER, "shard-00000", "arrow", data, rows=40)
    with pytest.raises(IntegrityError, match="Arrow IPC file") as caught:
        read_shard(store, FOLDER, shard)
    assert caught.value.path == f"{FOLDER}/{shard.name}"


def test_find_shards_after_an_attempt_takes_the_whole_ones(store: Store) -> None:
    shards = [write_shard(store, FOLDER, i, rollouts(10 * i, 10)) for i in range(3)]
    write_table(store, FOLDER, "ledger", schemas.LEDGER.empty_table())
    assert find_shards(store, FOLDER, range(5)) == dict(enumerate(shards))
    assert find_shards(store, FOLDER, [2, 4]) == {2: shards[2]}


def test_find_shards_where_nothing_was_made_finds_nothing(store: Store) -> None:
    assert find_shards(store, FOLDER, range(5)) == {}


@pytest.mark.parametrize("how", ["flipped", "cut", "emptied", "longer"])
def test_find_shards_with_a_broken_one_leaves_it_out_and_it_can_be_made_again(
    store: Store, how: str
) -> None:
    shards = [write_shard(store, FOLDER, i, rollouts(10 * i, 10)) for i in range(3)]
    path = f"{FOLDER}/{shards[1].name}"
    store.put(path, broken(store.read(path), how))
    assert find_shards(store, FOLDER, range(3)) == {0: shards[0], 2: shards[2]}
    assert write_shard(store, FOLDER, 1, rollouts(10, 10)) == shards[1]
    assert find_shards(store, FOLDER, range(3)) == dict(enumerate(shards))


def test_find_shards_with_a_stream_format_file_leaves_it_out(store: Store) -> None:
    write_file(store, FOLDER, "shard-00000", "arrow", stream_of(4, 2), rows=40)
    whole = write_shard(store, FOLDER, 0, rollouts(0, 40))
    assert find_shards(store, FOLDER, [0]) == {0: whole}


def test_find_shards_of_two_attempts_takes_one_of_them_always_the_same(store: Store) -> None:
    attempts = [write_shard(store, FOLDER, 0, rollouts(first, 5)) for first in (0, 100)]
    lower = min(attempts, key=lambda shard: shard.digest)
    assert find_shards(store, FOLDER, [0]) == {0: lower}


@pytest.mark.parametrize("name", ["../../../secret", "/etc/passwd", "s3://elsewhere/x"])
def test_shard_name_that_leaves_its_folder_is_refused(tmp_path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"not of this run")
    store = Store(str(tmp_path / "run"))
    with pytest.raises(ValueError, match="not a path inside"):
        read_file(store, "a/b", Shard(name, 0, 15, sha256(b"not of this run")))


def with_metadata(table: pa.Table, **metadata: str) -> pa.Table:
    encoded = {name.replace("_", ".").encode(): value for name, value in metadata.items()}
    return table.replace_schema_metadata({**table.schema.metadata, **encoded})


def test_shard_with_rows_of_a_later_version_is_refused_with_both_versions(store: Store) -> None:
    later = str(schemas.ROWS_VERSION + 1)
    table = with_metadata(rollouts(0, 5), ratchet_version=later)
    shard = write_shard(store, FOLDER, 0, table)
    words = rf"{shard.name} has rows of version {later}.*reads up to {schemas.ROWS_VERSION}"
    # Not taken for a broken one, which would be made again in its place.
    for read in (lambda: read_shard(store, FOLDER, shard), lambda: find_shards(store, FOLDER, [0])):
        with pytest.raises(ValueError, match=words) as caught:
            read()
        assert not isinstance(caught.value, IntegrityError)


def test_shard_with_a_version_that_is_no_number_is_refused(store: Store) -> None:
    table = with_metadata(rollouts(0, 5), ratchet_version="newest")
    shard = write_shard(store, FOLDER, 0, table)
    with pytest.raises(IntegrityError, match="'newest'"):
        read_shard(store, FOLDER, shard)


class Witness:
    """Says so, where it is unpickled."""

    was_called = False

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return Witness.call, ()

    @staticmethod
    def call() -> str:
        Witness.was_called = True
        return "called"


def test_shard_with_a_pickled_type_in_its_schema_is_read_without_unpickling_it(
    store: Store,
) -> None:
    # What Arrow once unpickled on reading (CVE-2023-47248).
    field = pa.field("sample_id", pa.string()).with_metadata(
        {
            "ARROW:extension:name": "arrow.py_extension_type",
            "ARROW:extension:metadata": pickle.dumps(Witness()),
        }
    )
    pickle.loads(pickle.dumps(Witness()))
    assert Witness.was_called
    Witness.was_called = False
    table = pa.Table.from_arrays([pa.array(["s0"])], schema=pa.schema([field]))
    shard = write_shard(store, FOLDER, 0, table)
    chunk = read_shard(store, FOLDER, shard)["sample_id"].chunk(0)
    assert getattr(chunk, "storage", chunk).to_pylist() == ["s0"]
    assert not Witness.was_called
