"""What S3 does on a bad day: healed by the client's own retries, or one error that says where."""

import itertools
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

import artifacts.store
from artifacts.errors import AlreadyExistsError, StoreError
from artifacts.manifests import Manifest, read_manifest, write_manifest
from artifacts.store import Store
from faulty_line import (
    CUT_REPLY,
    CUT_REQUEST,
    LOSE_REPLY,
    Fault,
    FaultyLine,
    faulty_line,
    s3_through,
)
from s3_server import BUCKET, S3Server

DATA = bytes(range(256)) * 400
MANIFEST = Manifest("rollouts", "rollout", 1, "a" * 64, {"lr": 0.5}, {}, {}, ())

CALLS: list[tuple[str, str, Callable[[Store], object]]] = [
    ("a/new", "write", lambda store: store.put("a/new", DATA)),
    ("a/newer", "write", lambda store: store.create("a/newer", DATA)),
    ("a/old", "read", lambda store: store.read("a/old")),
    ("a/old", "look for", lambda store: store.size("a/old")),
    ("a", "list", lambda store: store.names("a")),
]


@pytest.fixture
def line(s3_server: S3Server) -> Iterator[FaultyLine]:
    with faulty_line(s3_server.endpoint) as made:
        yield made


@pytest.fixture
def store(s3_server: S3Server) -> Store:
    """A store by the straight line, with one file in it."""
    made = Store(f"s3://{BUCKET}/{uuid4().hex}")
    made.put("a/old", DATA)
    return made


def at_first(fault: Fault, method: str = "") -> Callable[[str, str], Fault]:
    """``fault`` at the first request (of ``method``), and at no other."""
    faults = itertools.chain([fault], itertools.repeat(None))
    return lambda asked, path: next(faults) if method in ("", asked) else None


@pytest.mark.parametrize("fault", [503, CUT_REQUEST, CUT_REPLY])
def test_s3_trouble_that_passes_is_healed_by_the_client(
    store: Store, line: FaultyLine, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    with s3_through(line, 5, monkeypatch):
        through = Store(store.url)
        line.fault = at_first(fault, "PUT")
        through.put("a/new", DATA)
        line.fault = at_first(fault, "GET")
        assert through.read("a/new") == DATA
        line.fault = at_first(fault, "PUT")
        through.create("a/newer", DATA)
    assert store.names("a") == ["new", "newer", "old"]
    assert store.read("a/new") == store.read("a/newer") == DATA


@pytest.mark.parametrize("fault", [500, CUT_REQUEST, LOSE_REPLY])
def test_s3_trouble_that_lasts_leaves_as_one_error_with_operation_and_file(
    store: Store, line: FaultyLine, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    line.fault = lambda method, path: fault
    with s3_through(line, 1, monkeypatch):
        through = Store(store.url)
        for place, operation, call in CALLS:
            with pytest.raises(StoreError) as caught:
                call(through)
            assert isinstance(caught.value, OSError)
            assert str(caught.value).startswith(f"can't {operation} {store.url}/{place}: ")
    assert store.read("a/old") == DATA
    made = store.names("a")
    assert made == (["new", "newer", "old"] if fault == LOSE_REPLY else ["old"])
    assert {store.read(f"a/{name}") for name in made} == {DATA}


def test_s3_answer_cut_short_is_never_taken_for_the_whole(
    store: Store, line: FaultyLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.fault = lambda method, path: CUT_REPLY if method == "GET" else None
    with s3_through(line, 1, monkeypatch), pytest.raises(StoreError, match="can't read"):
        Store(store.url).read("a/old")


def test_s3_conflict_of_two_creations_is_tried_again(
    store: Store, line: FaultyLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = iter([409, 409, None])
    line.fault = lambda method, path: next(faults)
    with s3_through(line, 5, monkeypatch):
        Store(store.url).create("a/new", DATA)
    assert [method for method, _ in line.requests] == ["PUT"] * 3
    assert store.read("a/new") == DATA


def test_s3_conflict_that_another_won_is_settled_by_what_stands_there(
    store: Store, line: FaultyLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.fault = at_first(409, "PUT")
    theirs = write_manifest(store, "a", MANIFEST)
    with s3_through(line, 5, monkeypatch):
        through = Store(store.url)
        assert write_manifest(through, "a", MANIFEST) == theirs
        line.fault = at_first(409, "PUT")
        with pytest.raises(AlreadyExistsError):
            through.create("a/old", b"second")
    assert store.read("a/old") == DATA


def test_s3_conflict_without_end_gives_up_and_says_so(
    store: Store, line: FaultyLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = [0.0] * len(artifacts.store._CONFLICT_WAITS)
    monkeypatch.setattr(artifacts.store, "_CONFLICT_WAITS", waits)
    line.fault = lambda method, path: 409
    with s3_through(line, 5, monkeypatch), pytest.raises(StoreError, match="ConditionalRequest"):
        Store(store.url).create("a/new", DATA)
    assert [method for method, _ in line.requests] == ["PUT"] * (len(waits) + 1)
    assert not store.exists("a/new")


def test_s3_commit_whose_reply_was_lost_is_a_commit(
    store: Store, line: FaultyLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.fault = at_first(LOSE_REPLY, "PUT")
    with s3_through(line, 5, monkeypatch):
        # The client tries again, and finds the name taken: by itself.
        assert write_manifest(Store(store.url), "a", MANIFEST).digest == MANIFEST.digest
    assert [method for method, _ in line.requests].count("PUT") == 2
    assert read_manifest(store, "a").digest == MANIFEST.digest
