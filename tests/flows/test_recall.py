"""Recalling a run: what it asks of the store, and that reading ahead decides nothing."""

from pathlib import Path
from typing import Any

import pytest

from artifacts.ahead import ReadAhead
from artifacts.collection import collect, plan_collection
from artifacts.errors import IntegrityError
from artifacts.keep_rules import parse_rule
from artifacts.store import Store
from artifacts.tombstones import is_retired
from flows.session import Session
from small_run import finished_run, small_plan, write_snapshot
from stages.contract import find
from stages.update.trainers import newest_snapshot

OPERATIONS = ("cat_file", "exists", "find", "info", "ls", "pipe_file", "rm_file")


class Counted:
    """A file system that keeps a record of what it is asked: (operation, path in the run)."""

    def __init__(self, store: Store) -> None:
        self._fs, self._root = store.fs, store.root
        self.asked: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fs, name)
        if name not in OPERATIONS:
            return found

        def ask(path: str, *arguments: Any, **options: Any) -> Any:
            self.asked.append((name, path.removeprefix(self._root).lstrip("/")))
            return found(path, *arguments, **options)

        return ask


def resumed(folder: Path, iterations: int) -> tuple[Session, Counted]:
    """A session on a finished run, and what it asks of the store from now on."""
    run = finished_run(small_plan(folder, iterations=iterations, run=f"run-{iterations}"))
    counted = run.store.fs = Counted(run.store)
    return Session(run), counted


def by_operation(counted: Counted) -> dict[str, int]:
    names = [name for name, _ in counted.asked]
    return {name: names.count(name) for name in OPERATIONS if name in names}


def test_recall_asks_of_each_iteration_one_listing_and_three_reads(tmp_path: Path) -> None:
    few, many = (resumed(tmp_path, iterations) for iterations in (10, 100))
    for session, _ in (few, many):
        session.look_back()
    counts = [by_operation(counted) for _, counted in (few, many)]
    # The prompts, looked for and then opened, are the rest.
    assert counts == [{"cat_file": 3 * n + 2, "find": n + 2} for n in (10, 100)]
    for _, counted in (few, many):
        listed = [path for name, path in counted.asked if name == "find"]
        assert all(path.startswith(("iteration-", "prompts/")) for path in listed)


def test_recall_after_gc_finds_every_iteration_and_asks_no_more_for_it(tmp_path: Path) -> None:
    session, counted = resumed(tmp_path, 12)
    session.recall_finished()
    write_snapshot(session.store, session.history[11])
    before = dict(session.iterations)
    collect(session.store, plan_collection(session.store, [parse_rule("last=1")]))
    again = Session(session.run)
    counted.asked.clear()
    assert again.recall_finished() == 12
    assert again.iterations == before
    assert by_operation(counted) == {"cat_file": 3 * 12 + 2, "find": 12 + 2}
    retired = [is_retired(again.store, update.folder) for update in again.history]
    assert retired == [True] * 11 + [False]
    assert again.is_complete()


def test_stages_of_recalled_iterations_ask_the_store_nothing(tmp_path: Path) -> None:
    session, counted = resumed(tmp_path, 10)
    session.look_back()
    counted.asked.clear()
    for iteration in range(1, 11):
        for stage in (session.rollout, session.score, session.update):
            assert stage(iteration).was_reused
    assert counted.asked == []
    assert len(session.history) == 10


def test_newest_snapshot_of_a_long_run_is_found_by_one_listing(tmp_path: Path) -> None:
    session, counted = resumed(tmp_path, 100)
    session.recall_finished()
    write_snapshot(session.store, session.history[4])
    counted.asked.clear()
    assert newest_snapshot(session.store, session.history) == 5
    # Then a look at its manifest, and at whether its files are there.
    assert [name for name, _ in counted.asked] == ["ls", "ls", "cat_file", "find"]
    assert newest_snapshot(session.store, session.history[:4]) == 0


@pytest.mark.parametrize("iteration", [1, 4, 9])
def test_recall_of_an_iteration_with_a_lost_file_names_it(tmp_path: Path, iteration: int) -> None:
    session, _ = resumed(tmp_path, 10)
    made = Session(session.run)
    made.recall_finished()
    scores = made.iterations[iteration].scores
    assert scores is not None
    path = f"{scores.folder}/{scores.manifest.shards[1].name}"
    session.store.remove(path)
    with pytest.raises(IntegrityError, match="no file") as caught:
        session.recall_finished()
    assert caught.value.path == path
    assert len(session.history) == iteration - 1


def test_recall_of_a_run_that_stopped_ends_at_its_last_whole_iteration(tmp_path: Path) -> None:
    session, _ = resumed(tmp_path, 10)
    made = Session(session.run)
    made.recall_finished()
    update = made.iterations[7].update
    assert update is not None
    session.store.remove(f"{update.folder}/manifest.json")
    assert session.recall_finished() == 6
    assert session.iterations[7].scores == made.iterations[7].scores
    assert session.iterations[7].update is None


def test_read_ahead_before_a_commit_finds_it_all_the_same(tmp_path: Path) -> None:
    session, _ = resumed(tmp_path, 2)
    session.recall_finished()
    work = session.rollout_work(2)
    path = f"{work.folder}/manifest.json"
    data = session.store.read(path)
    session.store.remove(path)
    ahead = ReadAhead(session.store, [1, 2])
    assert find(ahead, work) is None
    session.store.put(path, data)
    assert find(ahead, work) == session.iterations[2].rollout
