"""One writer per run: who holds it, who has to wait, and who has lost it without knowing."""

import os
import pickle
import socket
from dataclasses import replace

import pytest

from artifacts.errors import AlreadyExistsError, HeldError, IntegrityError, LeaseLostError
from artifacts.lease import FOLDER, Record, hold, read_newest
from artifacts.processes import this_process
from artifacts.store import Store
from holders import SINCE, beat, take, write_lease


@pytest.fixture
def local(tmp_path) -> Store:
    return Store(str(tmp_path / "run"))


def test_fresh_run_is_held_at_once_and_released_at_the_end(store: Store) -> None:
    with hold(store, 30) as lease:
        held = read_newest(store)
        assert held == lease.record
        assert (held.token, held.released) == (1, False)
        assert (held.host, held.process) == (socket.gethostname(), this_process())
        assert store.names(FOLDER) == ["000001.json"]
    assert read_newest(store) == replace(held, beat=1, released=True)
    token, waits, _ = take(store)
    assert (token, waits) == (2, [])


def test_failing_work_releases_the_run_too(local: Store) -> None:
    with pytest.raises(ZeroDivisionError), hold(local, 30):
        _ = 1 / 0
    assert read_newest(local).released


def test_heartbeat_keeps_a_live_holder_for_many_times_to_live(shared_store: Store) -> None:
    with hold(shared_store, 1) as lease:
        while lease.record.beat < 9:  # three a time to live; each refusal waits for one
            with pytest.raises(HeldError, match=f"process {os.getpid()} on"):
                take(shared_store)
        lease.check()
    assert shared_store.names(FOLDER) == ["000001.json"]


CLOCKS = ["1970-01-01T00:00:00+00:00", "2999-12-31T23:59:59+00:00", "yesterday, towards noon"]


@pytest.mark.parametrize("since", CLOCKS)
def test_clock_of_a_live_holder_changes_nothing(local: Store, since: str) -> None:
    record = write_lease(local, since=since, ttl_seconds=1)
    with (
        pytest.raises(HeldError, match=f"process 4242 on far since {since}".replace("+", r"\+")),
        hold(local, 30, lambda found: beat(local, found)),
    ):
        pass
    assert read_newest(local) == replace(record, beat=1)


@pytest.mark.parametrize("since", CLOCKS)
def test_clock_of_a_silent_or_released_holder_changes_nothing(local: Store, since: str) -> None:
    silent = write_lease(local, since=since)
    token, waits, seconds = take(local)
    assert (token, waits) == (6, [silent])
    assert seconds >= silent.ttl_seconds
    write_lease(local, token=7, since=since, released=True)
    assert take(local)[:2] == (8, [])


def test_holder_released_while_it_is_watched_is_followed_at_once(local: Store) -> None:
    write_lease(local, ttl_seconds=1)
    waits = []

    def let_go(found: Record) -> None:
        waits.append(found)
        local.put(found.path, replace(found, released=True).to_json())

    with hold(local, 30, let_go) as lease:
        assert (lease.record.token, len(waits)) == (6, 1)


def test_process_number_used_again_does_not_pass_for_the_holder(local: Store) -> None:
    here = this_process()
    write_lease(local, process=replace(here, start=here.start - 1), ttl_seconds=1)
    assert take(local)[:2] == (6, [])


def test_highest_token_is_found_by_number_among_other_files(local: Store) -> None:
    write_lease(local, token=999_999, owner="old")
    newest = write_lease(local, token=1_000_000, released=True)
    local.put(f"{FOLDER}/notes.txt", b"")
    assert read_newest(local) == newest
    assert take(local)[0] == 1_000_001


class Overtaken(Store):
    """Right after its first creation, somebody else takes the next token."""

    rival: Record | None = None

    def create(self, path: str, data: bytes) -> None:
        super().create(path, data)
        if self.rival is None:
            self.rival = write_lease(self, token=2, ttl_seconds=1)


def test_creation_with_a_higher_token_beside_it_owns_nothing(tmp_path) -> None:
    store = Overtaken(str(tmp_path))
    with (
        pytest.raises(HeldError, match="process 4242 on far"),
        hold(store, 30, lambda found: beat(store, found)),
    ):
        pass


class LostReply(Store):
    """The creation works, its answer is lost, and the client's repeat is refused."""

    def create(self, path: str, data: bytes) -> None:
        super().create(path, data)
        raise AlreadyExistsError(path)


def test_creation_whose_reply_was_lost_is_known_by_its_owner(tmp_path) -> None:
    assert take(LostReply(str(tmp_path)))[:2] == (1, [])


class Away(Store):
    """A store that can't be written for a while; says when that was tried."""

    is_away = False

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.read_end, self.write_end = os.pipe()

    def put(self, path: str, data: bytes) -> None:
        os.write(self.write_end, b"!" if self.is_away else b".")
        if self.is_away:
            raise OSError("the store is away")
        super().put(path, data)

    def wait_for(self, mark: bytes) -> None:
        while os.read(self.read_end, 1) != mark:
            pass


def test_heartbeat_that_fails_for_a_while_is_no_loss(tmp_path) -> None:
    store = Away(str(tmp_path))
    with hold(store, 0.3) as lease:
        store.is_away = True
        store.wait_for(b"!")
        lease.check()
        store.is_away = False
        store.wait_for(b".")
        lease.check()


def test_heartbeat_that_failed_is_named_as_the_cause_of_a_loss(tmp_path) -> None:
    store = Away(str(tmp_path))
    with hold(store, 0.3) as lease:
        store.is_away = True
        for _ in range(2):  # the second begins when the first has been dealt with
            store.wait_for(b"!")
        write_lease(Store(str(tmp_path)), token=2)
        with pytest.raises(LeaseLostError, match="taken over by process 4242 on far") as lost:
            lease.check()
        assert str(lost.value.__cause__) == "the store is away"


def test_record_that_was_removed_is_a_loss(local: Store) -> None:
    with hold(local, 30) as lease:
        local.remove(lease.record.path)
        with pytest.raises(LeaseLostError, match="lost its lease's record"):
            lease.check()


def test_folder_that_shows_no_record_is_an_error_and_not_waited_for(local: Store) -> None:
    local.put(FOLDER, b"a file in the folder's place")
    with pytest.raises(OSError, match="lease 1 was created, and can't be found"):
        take(local)


def test_record_that_is_none_is_named(local: Store) -> None:
    local.put(f"{FOLDER}/000003.json", b'{"token": 3}')
    with pytest.raises(IntegrityError, match=r"lease/000003\.json: expected content a lease"):
        take(local)


def test_guard_stays_in_the_process_that_holds(local: Store) -> None:
    with hold(local, 30):
        write_lease(local, token=2)
        with pytest.raises(LeaseLostError):
            local.guard()
        pickle.loads(pickle.dumps(local)).guard()
    local.guard()


def test_errors_travel_between_processes_with_their_sentences() -> None:
    errors = [HeldError("runs/a", "far", 7, SINCE), LeaseLostError("runs/a", "was taken over")]
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
