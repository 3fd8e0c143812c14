"""What every backend promises: one suite, run on each."""

import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from artifacts.branches import BranchStore
from artifacts.errors import AlreadyExistsError, UrlError
from artifacts.store import Store
from child import run_child, start_child

ESCAPES = [
    "../x",
    "a/../../x",
    "a/..",
    "/etc/passwd",
    "s3://other/x",
    "file:///x",
    ".",
    "",
    "a//b",
    "a/",
    "a\\..\\x",
    "a\0b",
    "a\nb",
]
CALLS = ["read", "put", "create", "exists", "size", "remove", "names"]


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that take turns so often that a race is run rather than missed."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_store_put_then_read_gives_the_bytes(store: Store) -> None:
    data = bytes(range(256)) * 1000
    store.put("a/b/c.bin", data)
    assert store.read("a/b/c.bin") == data
    assert store.size("a/b/c.bin") == len(data)
    assert store.exists("a/b/c.bin")


def test_store_put_of_no_bytes_is_a_file(store: Store) -> None:
    store.put("a/empty", b"")
    assert store.read("a/empty") == b""
    assert store.size("a/empty") == 0
    assert store.exists("a/empty")


def test_store_put_over_a_file_replaces_all_of_it(store: Store) -> None:
    store.put("a/x", b"long, long ago")
    store.put("a/x", b"now")
    assert store.read("a/x") == b"now"
    assert store.size("a/x") == 3
    assert store.names("a") == ["x"]


def test_store_missing_path_is_missing_to_every_question(store: Store) -> None:
    assert not store.exists("a/x")
    assert store.size("a/x") is None
    assert store.names("a") == []
    assert store.names("") == []
    with pytest.raises(FileNotFoundError):
        store.read("a/x")


def test_store_folder_has_no_size_and_no_bytes(store: Store) -> None:
    store.put("a/x", b"1")
    assert store.size("a") is None
    with pytest.raises(OSError, match=r".+"):
        store.read("a")


def test_store_names_gives_what_lies_directly_in_a_folder_in_order(store: Store) -> None:
    for path in ["b/2", "b/10", "b/1", "b/deep/er/x", "bb/y", "a"]:
        store.put(path, b"1")
    assert store.names("b") == ["1", "10", "2", "deep"]
    assert store.names("") == ["a", "b", "bb"]


def test_store_names_of_many_files_misses_none(store: Store) -> None:
    # More than the 1000 that an S3 listing gives at once.
    names = [f"{index:04d}" for index in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.put(f"many/{name}", b"1"), names))
    assert store.names("many") == names


@pytest.mark.parametrize("name", ["with space", "ümläut", "a=b+c&d", "per%20cent", "#1?", "x~"])
def test_store_unusual_names_come_back_as_they_went(store: Store, name: str) -> None:
    store.put(f"odd/{name}", name.encode())
    assert store.names("odd") == [name]
    assert store.read(f"odd/{name}") == name.encode()


def test_store_remove_twice_leaves_nothing_and_no_error(store: Store) -> None:
    store.put("a/x", b"1")
    store.put("a/y", b"2")
    store.remove("a/x")
    store.remove("a/x")
    assert not store.exists("a/x")
    assert store.names("a") == ["y"]


def test_store_create_over_a_file_is_refused_and_changes_nothing(store: Store) -> None:
    store.create("a/x", b"first")
    with pytest.raises(AlreadyExistsError, match="a/x"):
        store.create("a/x", b"second")
    with pytest.raises(AlreadyExistsError):
        store.create("a/x", b"first")
    assert store.read("a/x") == b"first"
    assert store.names("a") == ["x"]


def test_store_create_after_remove_succeeds(store: Store) -> None:
    store.create("a/x", b"first")
    store.remove("a/x")
    store.create("a/x", b"second")
    assert store.read("a/x") == b"second"


@pytest.mark.usefixtures("eager_threads")
def test_store_create_from_many_threads_has_one_winner(store: Store) -> None:
    num_threads = 4
    # SeaweedFS makes a loser of a race wait a second or more.
    num_turns = 3 if store.url.startswith("s3") else 100
    barrier = threading.Barrier(num_threads)

    def attempt(path: str, number: int) -> int | None:
        barrier.wait()
        try:
            store.create(path, f"{number}".encode())
        except AlreadyExistsError:
            return None
        return number

    with ThreadPoolExecutor(num_threads) as pool:
        for turn in range(num_turns):
            path = f"race/{turn}"
            tries = pool.map(attempt, [path] * num_threads, range(num_threads))
            winners = [number for number in tries if number is not None]
            assert [f"{number}".encode() for number in winners] == [store.read(path)]


CREATOR = """
import sys
from artifacts.errors import AlreadyExistsError
from artifacts.store import Store
store = Store(sys.argv[1])
store.exists("race")
print("ready", flush=True)
for turn in sys.stdin:
    try:
        store.create(f"race/{turn.strip()}", sys.argv[2].encode())
        print("won", flush=True)
    except AlreadyExistsError:
        print("lost", flush=True)
"""


def test_store_create_from_many_processes_has_one_winner(shared_store: Store) -> None:
    children = [start_child(CREATOR, shared_store.url, number) for number in range(2)]
    try:
        assert [child.stdout.readline() for child in children] == ["ready\n"] * 2
        for turn in range(5):
            for child in children:
                child.stdin.write(f"{turn}\n")
            for child in children:
                child.stdin.flush()
            results = [child.stdout.readline().strip() for child in children]
            assert sorted(results) == ["lost", "won"]
            assert shared_store.read(f"race/{turn}") == str(results.index("won")).encode()
    finally:
        for child in children:
            child.communicate()


def test_store_pickled_copy_writes_and_the_original_sees_it_at_once(store: Store) -> None:
    copy = pickle.loads(pickle.dumps(store))
    store.put("a/1", b"one")
    assert store.names("a") == ["1"]
    assert not store.exists("a/2")
    copy.put("a/2", b"two")
    copy.put("a/1", b"one, rewritten")
    assert store.exists("a/2")
    assert store.names("a") == ["1", "2"]
    assert [store.read("a/1"), store.read("a/2")] == [b"one, rewritten", b"two"]


WRITER = """
import json, sys
from artifacts.store import Store
store = Store(sys.argv[1])
for path, text in json.loads(sys.argv[2]).items():
    store.put(path, text.encode())
"""


def test_store_another_process_writes_and_this_one_sees_it_at_once(shared_store: Store) -> None:
    shared_store.put("a/1", b"one")
    assert shared_store.names("a") == ["1"]
    assert shared_store.size("a/1") == 3
    assert not shared_store.exists("a/2")
    writes = {"a/2": "two", "a/1": "one, rewritten"}
    run_child(WRITER, shared_store.url, json.dumps(writes))
    assert shared_store.names("a") == ["1", "2"]
    assert shared_store.exists("a/2")
    assert shared_store.size("a/1") == len("one, rewritten")
    assert {path: shared_store.read(path).decode() for path in writes} == writes


LATE_WRITER = """
import sys
from artifacts.store import Store
store = Store(sys.argv[1])
sys.stdin.readline()
store.put("a/done", b"")
"""


def test_store_poll_for_another_process_ends(shared_store: Store) -> None:
    child = start_child(LATE_WRITER, shared_store.url)
    try:
        assert shared_store.names("a") == []
        assert not shared_store.exists("a/done")
        child.stdin.write("go\n")
        child.stdin.flush()
        deadline = time.monotonic() + 30
        while not shared_store.exists("a/done"):
            assert time.monotonic() < deadline, "the other process's file never appeared"
    finally:
        child.communicate()
    assert shared_store.names("a") == ["done"]


OPENER = """
import pickle, sys
store = pickle.loads(bytes.fromhex(sys.argv[1]))
print(store.read("a/x").decode())
"""


def test_store_pickled_to_another_process_opens_there(shared_store: Store) -> None:
    shared_store.put("a/x", b"carried over")
    assert run_child(OPENER, pickle.dumps(shared_store).hex()) == "carried over\n"


def test_store_of_relative_path_means_the_same_folder_in_another_one(tmp_path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    store = Store("run")
    store.put("a/x", b"carried over")
    output = run_child(OPENER, pickle.dumps(store).hex(), cwd=tmp_path / "there")
    assert output == "carried over\n"
    assert os.listdir(tmp_path / "there") == []


def test_store_path_that_leaves_the_folder_is_refused_by_every_backend(store: Store) -> None:
    above, _, name = store.url.rpartition("/")
    store.put("a/x", b"1")
    for path in ESCAPES:
        for call in CALLS:
            if call == "names" and not path:
                continue  # the run's own folder
            arguments = (path, b"1") if call in ("put", "create") else (path,)
            with pytest.raises(ValueError, match="not a path inside"):
                getattr(store, call)(*arguments)
    assert Store(above).names("") == [name]
    assert store.names("") == ["a"]


@pytest.mark.parametrize("name", ["a\\b", "tab\there"])
def test_store_names_that_no_run_wrote_are_passed_over(tmp_path: Path, name: str) -> None:
    store = Store(str(tmp_path / "run"))
    store.put("a/x", b"1")
    (tmp_path / "run" / "a" / name).write_bytes(b"2")
    assert store.names("a") == ["x"]


def test_store_of_a_cloud_whose_package_is_missing_says_what_to_install() -> None:
    output = run_child(OPEN_WITHOUT, "gs://bucket/run", "gcsfs")
    assert "pip install 'ratchet-rl[gs]'" in output
    assert "pip install 'ratchet-rl[az]'" in run_child(OPEN_WITHOUT, "az://box/run", "adlfs")
    assert "pip install 'ratchet-rl[s3]'" in run_child(OPEN_WITHOUT, "s3://bucket/run", "s3fs")


OPEN_WITHOUT = """
import sys
sys.modules[sys.argv[2]] = None  # as if it were not installed
from artifacts.errors import UrlError
from artifacts.store import Store
try:
    Store(sys.argv[1])
except UrlError as error:
    print(error)
"""


def test_store_of_an_unknown_protocol_is_refused_by_name() -> None:
    with pytest.raises(UrlError, match=r"gopher://x/run is no URL of a file system"):
        Store("gopher://x/run")


def test_store_sizes_are_those_of_every_file_below_and_of_no_other(store: Store) -> None:
    for path, size in {"a/x": 3, "a/b/c/y": 5, "a/b/z": 0, "ab/x": 7, "top": 1}.items():
        store.put(path, b"1" * size)
    assert store.sizes("a") == {"x": 3, "b/c/y": 5, "b/z": 0}
    assert store.sizes("a/b") == {"c/y": 5, "z": 0}
    assert store.sizes("none") == {}
    store.put("a/x", b"12345678")
    store.remove("a/b/z")
    assert store.sizes("a") == {"x": 8, "b/c/y": 5}


def test_store_read_in_parts_is_the_read_in_one(store: Store) -> None:
    data = bytes(range(256)) * 1000
    store.put("a/x", data)
    assert store.read("a/x", is_large=True) == store.read("a/x") == data
    for is_large in (False, True):
        with pytest.raises(FileNotFoundError):
            store.read("a/none", is_large)


def test_store_put_under_a_later_name_is_whole_under_it_and_asks_it_once(store: Store) -> None:
    asked = []

    def name() -> str:
        asked.append(1)
        return "late"

    store.put_named("a/b", name, b"1")
    assert (store.names("a/b"), store.read("a/b/late"), asked) == (["late"], b"1", [1])


def test_store_put_whose_name_never_comes_leaves_nothing(store: Store) -> None:
    def name() -> str:
        raise OSError("no name")

    with pytest.raises(OSError, match="no name"):
        store.put_named("a/b", name, b"1")
    assert store.sizes("a") == {}


def test_branch_sizes_are_its_own_and_what_it_inherits(store: Store) -> None:
    child = BranchStore(f"{store.url}-child", store, iteration=1)
    for iteration in ("iteration-000001", "iteration-000002"):
        store.put(f"{iteration}/x", b"of the parent")
    child.put("iteration-000001/y", b"own")
    child.put("iteration-000002/y", b"own")
    assert child.sizes("iteration-000001") == {"x": 13, "y": 3}
    assert child.sizes("iteration-000002") == {"y": 3}


def test_branch_that_scores_its_parents_samples_anew_has_their_rollouts_alone(store: Store) -> None:
    for iteration in ("iteration-000001", "iteration-000002", "iteration-000003"):
        for stage in ("rollout", "score"):
            store.put(f"{iteration}/{stage}/k/x", b"bytes")
    child = BranchStore(f"{store.url}-child", store, iteration=1, rollouts=2)
    assert child.sizes("iteration-000001") == {"rollout/k/x": 5, "score/k/x": 5}
    assert child.sizes("iteration-000002") == {"rollout/k/x": 5}
    assert child.sizes("iteration-000003") == {}
    child.put("iteration-000002/score/k/x", b"own")
    assert child.sizes("iteration-000002") == {"rollout/k/x": 5, "score/k/x": 3}
