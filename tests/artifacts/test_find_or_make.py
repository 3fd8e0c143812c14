"""The stage contract: work is done once, and what is half done counts as nothing."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from artifacts import schemas
from artifacts.errors import IntegrityError
from artifacts.manifests import Ref, Shard, read_manifest
from artifacts.runs import committed, is_committed
from artifacts.shards import find_shards, read_shard, read_table, write_shard
from artifacts.store import Store
from stages.contract import Committed, Product, Work, find, find_or_make

WORK = Work(
    kind="steps",
    stage="update",
    version=1,
    iteration=3,
    identity={"lr": 0.5, "betas": (0.9, 0.999)},
    inputs={"rollout": Ref("iteration-000003/rollout/abc", "1" * 64), "policy": Ref("p", "2" * 64)},
    functions={"exact": "3" * 64},
)

# One change to each part that determines a result.
CHANGES: dict[str, Any] = {
    "stage": "score",
    "version": 2,
    "iteration": 4,
    "identity": {"lr": 0.25, "betas": (0.9, 0.999)},
    "inputs": {**WORK.inputs, "policy": Ref("p", "4" * 64)},
    "functions": {"exact": "5" * 64},
}


def steps(first: int) -> pa.Table:
    rows = [{"step": first + n, "name": "loss", "value": 0.1 * n} for n in range(10)]
    return pa.Table.from_pylist(rows, schema=schemas.STEPS)


def write_steps(store: Store, count: int = 4) -> list[Shard]:
    return [write_shard(store, WORK.folder, n, steps(10 * n)) for n in range(count)]


def never() -> Product:
    raise AssertionError("what is committed was made again")


def make(store: Store) -> Committed:
    return find_or_make(store, WORK, lambda: Product(write_steps(store), {"next": 1}, {"loss": 0}))


def test_work_done_once_is_found_after(store: Store) -> None:
    assert find(store, WORK) is None
    first = make(store)
    assert not first.was_reused
    again = find_or_make(store, WORK, never)
    assert again.was_reused
    assert again == replace(first, was_reused=True)
    assert find(store, WORK) == again
    assert again.ref == Ref(WORK.folder, first.manifest.digest)
    assert read_table(store, again.folder, again.manifest).num_rows == 40


def test_work_committed_says_what_determined_it(store: Store) -> None:
    make(store)
    manifest = read_manifest(store, WORK.folder)
    assert (manifest.kind, manifest.stage, manifest.stage_version) == ("steps", "update", 1)
    assert manifest.key == WORK.key
    assert manifest.inputs == WORK.inputs
    assert manifest.functions == WORK.functions
    assert manifest.identity == {"lr": 0.5, "betas": [0.9, 0.999]}
    assert manifest.provenance["seconds"] >= 0


@pytest.mark.parametrize("part", CHANGES)
def test_work_key_changes_with_every_part_that_determines_the_result(part: str) -> None:
    assert replace(WORK, **{part: CHANGES[part]}).key != WORK.key


def test_work_changes_of_this_test_leave_no_part_out() -> None:
    # What shards hold follows from the stage and its version.
    assert set(CHANGES) == set(vars(WORK)) - {"kind"}


def test_work_key_changes_with_the_name_of_an_input() -> None:
    rollout, policy = WORK.inputs.values()
    assert replace(WORK, inputs={"rollout": policy, "policy": rollout}).key != WORK.key
    assert replace(WORK, inputs={"rollout": rollout, "reference": policy}).key != WORK.key


def test_work_key_is_blind_to_where_inputs_lie_and_to_order() -> None:
    moved = {name: Ref(f"elsewhere/{ref.path}", ref.digest) for name, ref in WORK.inputs.items()}
    assert replace(WORK, inputs=dict(reversed(moved.items()))).key == WORK.key
    assert replace(WORK, identity=dict(reversed(WORK.identity.items()))).key == WORK.key


def test_work_with_another_identity_is_not_found(store: Store) -> None:
    make(store)
    assert find(store, replace(WORK, identity={"lr": 0.25})) is None


def test_work_that_cannot_be_keyed_is_refused_before_it_is_done(store: Store) -> None:
    work = replace(WORK, identity={"lr": 0.5, "lock": threading.Lock()})
    with pytest.raises(TypeError, match=r"value\.identity\.lock is a lock"):
        find_or_make(store, work, never)


def fails_after_one_shard(store: Store) -> Callable[[], Product]:
    def attempt() -> Product:
        write_steps(store, count=1)
        raise OSError("out of luck after shard 1 of 4")

    return attempt


def test_work_that_raises_commits_nothing_and_leaves_whole_shards(store: Store) -> None:
    with pytest.raises(OSError, match="out of luck"):
        find_or_make(store, WORK, fails_after_one_shard(store))
    assert not is_committed(store, WORK.folder)
    assert find(store, WORK) is None
    assert committed(store, WORK.iteration, "update") == []
    left = find_shards(store, WORK.folder, range(4))
    assert list(left) == [0]
    assert read_shard(store, WORK.folder, left[0]).equals(steps(0))


def test_work_made_after_a_failed_attempt_equals_an_undisturbed_one(store: Store) -> None:
    with pytest.raises(OSError, match="out of luck"):
        find_or_make(store, WORK, fails_after_one_shard(store))
    disturbed = make(store)
    undisturbed = make(Store(f"{store.url}-undisturbed"))
    assert disturbed.manifest.digest == undisturbed.manifest.digest
    assert not disturbed.was_reused


def test_work_done_by_two_at_once_is_committed_once(store: Store) -> None:
    barrier = threading.Barrier(2)

    def both(number: int) -> Committed:
        def attempt() -> Product:
            barrier.wait()  # neither has committed when both begin
            return Product(write_steps(store), provenance={"worker": number})

        return find_or_make(store, WORK, attempt)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(both, range(2))
    assert first.manifest == second.manifest
    found = find(store, WORK)
    assert found is not None
    assert found.manifest == first.manifest


def test_work_done_by_two_with_other_results_is_an_error(store: Store) -> None:
    def attempt() -> Product:
        make(store)  # somebody else is first, with other content
        return Product(write_steps(store, count=3))

    with pytest.raises(IntegrityError, match="second commit"):
        find_or_make(store, WORK, attempt)
    found = find(store, WORK)
    assert found is not None
    assert len(found.manifest.shards) == 4


@pytest.mark.parametrize("how", ["missing", "cut", "longer"])
def test_find_with_a_committed_file_not_whole_is_refused_by_name(store: Store, how: str) -> None:
    shard = make(store).manifest.shards[2]
    path = f"{WORK.folder}/{shard.name}"
    data = store.read(path)
    if how == "missing":
        store.remove(path)
    else:
        store.put(path, data[:-1] if how == "cut" else data + b"\0")
    for ask in (lambda: find(store, WORK), lambda: find_or_make(store, WORK, never)):
        with pytest.raises(IntegrityError, match=rf"expected bytes {shard.bytes}") as caught:
            ask()
        assert caught.value.path == path


def test_find_with_a_broken_manifest_is_refused_and_nothing_is_made(store: Store) -> None:
    make(store)
    path = f"{WORK.folder}/manifest.json"
    data = store.read(path)
    store.put(path, data[: len(data) // 2])
    with pytest.raises(IntegrityError, match=path):
        find_or_make(store, WORK, never)
