"""Snapshots under kills, full disks and other histories: always a whole one to go on from."""

import os
import random
import re
import select
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from artifacts.errors import IntegrityError, StoreError
from artifacts.manifests import Ref, read_manifest
from artifacts.store import Store
from artifacts.verification import committed_folders, verify
from child import start_child
from faulty_store import FULL_DISK, FaultyStore, files
from flows.plan import Plan
from flows.session import Session
from plain_run import begin, digests, plain_plan, train
from stages.update.snapshot import KINDS, read_snapshot
from stages.update.trainers import newest_snapshot, policy_work


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plain_plan(tmp_path, iterations=3, checkpoint={"every": 1})


@pytest.fixture
def store(tmp_path: Path, plan: Plan) -> Store:
    """A run with a snapshot after each of its three iterations."""
    made = Store(str(tmp_path / "run"))
    train(made, plan)
    return made


def recalled(store: Store, plan: Plan) -> Session:
    session = begin(store, plan)
    session.recall_finished()
    return session


def test_resume_after_a_snapshot_without_its_mark_takes_the_one_before(
    store: Store, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, session = digests(store), recalled(store, plan)
    folder = policy_work(session.history[-1]).folder
    store.remove(f"{folder}/manifest.json")
    assert newest_snapshot(store, session.history) == 2
    with pytest.raises(FileNotFoundError, match=f"{folder}/manifest.json: not committed"):
        read_snapshot(store, Ref(folder, wanted[folder]))
    train(store, plan)
    assert digests(store) == wanted
    assert caplog.messages == []  # nothing is wrong: it was never committed


@pytest.mark.parametrize("part", KINDS)
def test_resume_after_a_snapshot_that_lost_a_part_takes_the_one_before_and_says_why(
    store: Store, plan: Plan, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted, session = digests(store), recalled(store, plan)
    folder = policy_work(session.history[-1]).folder
    (lost,) = (n for n in store.names(folder) if n.startswith(f"{part}-"))
    store.remove(f"{folder}/{lost}")
    with pytest.raises(IntegrityError, match=rf"{lost}: expected digest \w+, found no file"):
        read_snapshot(store, Ref(folder, wanted[folder]))
    assert newest_snapshot(store, session.history) == 2
    assert f"policy=3 passed_over={folder}/{lost}: expected bytes" in caplog.text
    # Going on makes the part again, as the replayed updates give the same bytes.
    train(store, plan)
    assert digests(store) == wanted
    assert verify(store).problems == []


def test_resume_after_a_snapshot_with_a_spoiled_part_fails_by_its_name(
    store: Store, plan: Plan
) -> None:
    session = recalled(store, plan)
    folder = policy_work(session.history[-1]).folder
    (name,) = (n for n in store.names(folder) if n.startswith("weights-"))
    data = store.read(f"{folder}/{name}")
    store.put(f"{folder}/{name}", data[:-1] + bytes([data[-1] ^ 1]))
    longer = plain_plan(Path(store.root).parent, iterations=4, checkpoint={"every": 1})
    with pytest.raises(IntegrityError, match=re.escape(f"{folder}/{name}: expected digest")):
        train(store, longer)


def test_full_disk_at_the_mark_of_a_snapshot_keeps_the_one_before_and_collides_with_nothing(
    tmp_path: Path, plan: Plan
) -> None:
    undisturbed = FaultyStore(str(tmp_path / "undisturbed"), FULL_DISK, at=0)
    train(undisturbed, plan)
    wanted = digests(undisturbed)
    # The run's last write is the manifest of its last snapshot.
    last = max(n for n, name in enumerate(undisturbed.calls, start=1) if name == "create")
    faulty = FaultyStore(str(tmp_path / "run"), FULL_DISK, at=last)
    with pytest.raises(StoreError, match=r"can't write .*/policy/000003/.*manifest.json: .*too"):
        train(faulty, plan)
    store = Store(faulty.url)
    before = files(store)
    assert newest_snapshot(store, recalled(store, plan).history) == 2
    for _ in range(2):  # the next start works, and passes the same place again
        train(store, plan)
        assert digests(store) == wanted
    assert {path: files(store)[path] for path in before} == before


def test_snapshots_of_another_history_in_the_same_place_are_not_picked_up(
    store: Store, plan: Plan
) -> None:
    session = recalled(store, plan)
    ours = policy_work(session.history[-1]).folder
    store.remove(f"{ours}/manifest.json")
    theirs = policy_work(session.history[1]).folder
    for place in ("policy/000030/0123456789abcdef", "policy/000003/0123456789abcdef"):
        for name in store.names(theirs):
            store.put(f"{place}/{name}", store.read(f"{theirs}/{name}"))
    assert newest_snapshot(store, session.history) == 2


# Forks a saver at each line, so that fifty of them cost one start of Python.
NURSERY = """
import os, sys, time
import numpy as np
from artifacts.manifests import Ref
from artifacts.store import Store
from stages.contract import Product, find_or_make
from stages.update.snapshot import KINDS, Snapshot, write_snapshot
from stages.update.trainers import PolicyWork

def save(store, step):
    tensors = {kind: {n: np.full((8, 8), step, np.float32) for n in "abc"} for kind in KINDS}
    work = PolicyWork("policy", "policy", 1, step, {"weights_digest": str(step)}, {})
    snapshot = Snapshot(tensors, {"step": step, "taken": step})
    find_or_make(store, work, lambda: Product(write_snapshot(store, work.folder, snapshot)))

store = Store(sys.argv[1])
save(store, 1)
start = time.monotonic()
save(store, 2)
print(time.monotonic() - start, flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        for step in range(int(line), 1_000_000):
            save(store, step)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


def newest_step(store: Store) -> int:
    """The newest committed step, after looking at each part of every committed snapshot."""
    steps = [0]
    for folder in committed_folders(store):
        manifest = read_manifest(store, folder)
        snapshot = read_snapshot(store, Ref(folder, manifest.digest))
        step = int(folder.split("/")[1])
        assert snapshot.state == {"step": step, "taken": step}
        for kind in KINDS:
            assert set(snapshot.tensors[kind]) == set("abc")
            assert all(np.all(array == step) for array in snapshot.tensors[kind].values())
        steps.append(step)
    return max(steps)


def kill_a_save(nursery: "subprocess.Popen[str]", first: int, seconds: float) -> None:
    """Have snapshots saved from step ``first`` on, and kill the process that does after a while."""
    nursery.stdin.write(f"{first}\n")
    nursery.stdin.flush()
    saver = int(nursery.stdout.readline())
    select.select([nursery.stdout], [], [], seconds)  # it says nothing as long as it lives
    os.kill(saver, signal.SIGKILL)
    assert nursery.stdout.readline() == "ended\n"


def test_snapshot_saves_killed_at_fifty_moments_leave_whole_ones_and_none_mixed(
    tmp_path: Path,
) -> None:
    store, moments = Store(str(tmp_path / "run")), random.Random(25)
    nursery = start_child(NURSERY, store.root)
    newest, num_cut = 2, 0
    try:
        one_save = float(nursery.stdout.readline())
        for _ in range(50):
            kill_a_save(nursery, newest + 1, moments.uniform(0.0, 2.5 * one_save))
            found = newest_step(store)
            assert found >= newest
            newest = found
            num_cut += any(int(version) > newest for version in store.names("policy"))
    finally:
        nursery.communicate()
    assert newest > 5, "no save came to its end"
    assert num_cut > 5, "no kill came in the middle of a save"
