"""The lease among processes that race, are killed, and are stopped at the worst time."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from artifacts.lease import FOLDER, hold, read_newest
from artifacts.store import Store
from holders import Children, take, write_lease


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    for child in made.all:
        child.process.kill()
        child.process.communicate()


@pytest.mark.parametrize("count", [2, 3])
def test_fresh_run_raced_for_by_processes_is_held_by_one(
    shared_store: Store, children: Children, count: int
) -> None:
    racers = children.start(shared_store, 3, count)
    for child in racers:
        child.say()
    said = {child.pid: child.hear() for child in racers}
    (winner,) = [pid for pid, words in said.items() if words == "holds 1"]
    record = read_newest(shared_store)
    assert record.process.pid == winner
    refusal = (
        f"refused run {shared_store.url} is held by process {winner} on {socket.gethostname()} "
        f"since {record.since}: wait until it has ended, or end it and resume the run"
    )
    assert [words for pid, words in said.items() if pid != winner] == [refusal] * (count - 1)


def test_silent_run_raced_for_by_processes_is_taken_over_by_one(
    shared_store: Store, children: Children
) -> None:
    write_lease(shared_store, token=7, ttl_seconds=0.5)
    racers = children.start(shared_store, 3, 3)
    for child in racers:
        child.say()
    said = sorted(child.hear() for child in racers)
    assert [words.split()[0] for words in said] == ["holds", "refused", "refused"]
    assert said[0] == "holds 8"
    winner = read_newest(shared_store).process.pid
    assert all(f"held by process {winner} on" in words for words in said[1:])


def test_killed_holder_is_replaced_at_once_on_its_host(
    shared_store: Store, children: Children
) -> None:
    child = children.start_holder(shared_store, 1)
    child.process.kill()
    child.process.wait()
    before = shared_store.read("lease/000001.json")
    token, waits, _ = take(shared_store)
    assert (token, waits) == (2, [])
    assert shared_store.read("lease/000001.json") == before


def test_killed_holder_of_another_host_is_replaced_after_its_time_to_live(
    shared_store: Store, children: Children
) -> None:
    child = children.start_holder(shared_store, 1)
    child.process.kill()
    child.process.wait()
    record = read_newest(shared_store)
    far = replace(record, process=replace(record.process, boot="another boot"))
    shared_store.put(far.path, far.to_json())
    token, waits, seconds = take(shared_store)
    assert (token, waits) == (2, [far])
    assert seconds >= 1


def test_stopped_holder_that_was_overtaken_commits_nothing_when_it_wakes(
    shared_store: Store, children: Children
) -> None:
    child = children.start_holder(shared_store, 1)
    child.say("iteration-000001/score/a")
    assert child.hear() == "committed"
    child.stop()
    with hold(shared_store, 30) as lease:
        assert lease.record.token == 2
        child.go_on()
        child.say("iteration-000001/score/b")
        said = child.hear()
        lease.check()
    assert said == (
        f"lost run {shared_store.url} was taken over by process {os.getpid()} on "
        f"{socket.gethostname()} at {lease.record.since}: this process commits nothing more in it; "
        "look after the run where it goes on, or resume it when it has ended there"
    )
    assert shared_store.names("iteration-000001/score") == ["a"]


def test_stopped_holder_that_nobody_overtook_goes_on(children: Children, tmp_path) -> None:
    local = Store(str(tmp_path / "run"))
    child = children.start_holder(local, 0.5)
    child.stop()
    # Another run's silent lease is the clock: taking it over lasts longer than this one's life.
    other = Store(str(tmp_path / "other"))
    write_lease(other, ttl_seconds=1.0)
    assert take(other)[2] >= 1
    child.go_on()
    child.say("iteration-000001/score/a")
    assert child.hear() == "committed"
    assert local.names(FOLDER) == ["000001.json"]
