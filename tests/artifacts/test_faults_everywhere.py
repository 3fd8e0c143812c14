"""A run with a fault at its n-th operation on the store, for every n: whole before, whole after."""

import contextlib
import itertools
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.ipc
import pytest

from artifacts.errors import IntegrityError
from artifacts.keys import sha256
from artifacts.manifests import read_manifest
from artifacts.store import Store
from artifacts.verification import verify
from faulty_line import CUT_REQUEST, LOSE_REPLY, Fault, FaultyLine, faulty_line, s3_through
from faulty_store import CUT_ANSWER, FAULTS, FaultyStore, files
from flows.plan import Plan
from plain_run import begin, digests, manifests, plain_plan, train
from s3_server import BUCKET, S3Server
from stages.contract import StageError

_DIGEST = re.compile(r"\.([0-9a-f]{64})\.\w+$")
# What a person may meet; anything else is a fault of ours.
EXPECTED = (OSError, ValueError, StageError)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is one: thousands of syncs, and their order is not at test."""
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as made:
        yield Path(made)


def assert_whole(store: Store, found: dict[str, bytes]) -> None:
    """Nothing in ``found`` lies under a final name and is not what the name promises."""
    for path, data in found.items():
        assert "/.tmp-" not in f"/{path}", "a fault that leaves the process alive leaves no scrap"
        if match := _DIGEST.search(path):
            assert sha256(data) == match[1], path
        else:
            json.loads(data)
        if path.endswith("/manifest.json"):
            folder = path.removesuffix("/manifest.json")
            for shard in read_manifest(store, folder).shards:
                assert sha256(found[f"{folder}/{shard.name}"]) == shard.digest


def assert_completes(store: Store, plan: Plan, before: dict[str, bytes], wanted: object) -> None:
    """Running again ends as the undisturbed run did, and what stood ``before`` still stands."""
    train(store, plan)
    assert digests(store) == wanted
    after = files(store)
    assert {path: after[path] for path in before} == before


@pytest.mark.parametrize("fault", FAULTS)
def test_run_with_a_fault_at_any_operation_is_whole_and_completes_by_running_again(
    folder: Path, fault: str
) -> None:
    plan = plain_plan(folder)
    undisturbed = FaultyStore(str(folder / "undisturbed"), fault, at=0)
    train(undisturbed, plan)
    places, wanted = undisturbed.places(), digests(undisturbed)
    num_failed = num_resumed = 0
    for at in places:
        faulty = FaultyStore(str(folder / f"at-{at}"), fault, at)
        try:
            train(faulty, plan)
        except EXPECTED:
            num_failed += 1
        assert faulty.has_failed
        healthy, left = Store(faulty.url), files(faulty)
        assert_whole(healthy, left)
        assert {path: left[path] for path in faulty.files_at_fault} == faulty.files_at_fault
        assert_completes(healthy, plan, left, wanted)
        num_resumed += any(m.provenance.get("found") for m in manifests(healthy).values())
    # Half an answer may be one that work survives: a listing that misses a shard has it made again.
    assert 10 < num_failed <= len(places)
    assert num_failed == len(places) or fault == CUT_ANSWER
    assert num_resumed > 0, "no rerun took up the whole shards of the one before it"
    assert verify(undisturbed).problems == []


@pytest.fixture
def line(moto: S3Server) -> Iterator[FaultyLine]:
    with faulty_line(moto.endpoint) as made:
        yield made


class FaultyFrom:
    """From the ``at``-th request from now on every one fails, in the way that is ``at``'s turn.

    One alone, aiohttp itself may heal: it asks again where a connection broke before any answer.
    """

    def __init__(self, line: FaultyLine, at: int) -> None:
        self._line, self._first = line, len(line.requests) + at
        self._fault = (500, CUT_REQUEST, LOSE_REPLY)[at % 3]
        line.fault = self

    def __call__(self, method: str, path: str) -> Fault:
        return self._fault if self.has_come else None

    @property
    def has_come(self) -> bool:
        return len(self._line.requests) >= self._first


def test_score_on_s3_with_a_fault_from_any_request_on_is_whole_and_completes_by_running_again(
    tmp_path: Path, line: FaultyLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plain_plan(tmp_path, iterations=1, checkpoint={"every": 1})
    local = Store(str(tmp_path / "undisturbed"))
    made = train(local, plan).iterations[1].rounds[0].scores
    with s3_through(line, 1, monkeypatch):
        session = begin(Store(f"s3://{BUCKET}/{uuid4().hex}"), plan)
        session.rollout(1)
        scores = Store(f"{session.store.url}/iteration-000001/score")
        for at in itertools.count(1):
            fault = FaultyFrom(line, at)
            with contextlib.suppress(OSError):
                session.score(1)
                break
            line.fault = lambda *_: None
            left = files(scores)
            assert_whole(scores, left)
            assert session.score(1).ref == made.ref  # the same bytes on any backend
            after = files(scores)
            assert {path: after[path] for path in left} == left
            scores.fs.rm(scores.root, recursive=True)
    assert at > 10
    assert not fault.has_come


@pytest.mark.slow
def test_run_on_s3_with_a_fault_from_any_request_on_is_whole_and_completes_by_running_again(
    tmp_path: Path, line: FaultyLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plain_plan(tmp_path, iterations=1, checkpoint={"every": 1})
    local = Store(str(tmp_path / "undisturbed"))
    train(local, plan)
    with s3_through(line, 1, monkeypatch):
        for at in itertools.count(1):
            store, fault = Store(f"s3://{BUCKET}/{uuid4().hex}"), FaultyFrom(line, at)
            with contextlib.suppress(OSError):
                train(store, plan)
                break
            line.fault = lambda *_: None
            left = files(store)
            assert_whole(store, left)
            assert_completes(store, plan, left, digests(local))
    assert at > 50
    assert not fault.has_come


def cut_after_half_the_batches(data: bytes) -> bytes:
    """The rows as a stream of two batches, cut after the first: it reads as a whole table."""
    table = pa.ipc.open_file(data).read_all()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.slice(0, 1))
        end = sink.tell()
        writer.write_table(table.slice(1))
    cut = bytes(sink.getvalue())[:end]
    assert pa.ipc.open_stream(cut).read_all().num_rows == 1
    return cut


@pytest.mark.parametrize(
    "damage",
    [
        cut_after_half_the_batches,
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"",
    ],
    ids=["stream cut between batches", "cut", "flipped", "emptied"],
)
def test_score_of_a_spoiled_rollout_fails_by_its_name_and_commits_nothing(
    tmp_path: Path, damage
) -> None:
    session = begin(Store(str(tmp_path / "run")), plain_plan(tmp_path))
    rollout = session.rollout(1)
    shard = rollout.manifest.shards[1]
    path = f"{rollout.folder}/{shard.name}"
    session.store.put(path, damage(session.store.read(path)))
    with pytest.raises(IntegrityError, match=f"expected digest {shard.digest}") as caught:
        session.score(1)
    assert caught.value.path == path
    assert {m.kind for m in manifests(session.store).values()} == {"prompts", "rollouts"}
