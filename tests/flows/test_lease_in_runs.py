"""The lease in real small trainings: when a run is held, and what one that was lost leaves."""

from pathlib import Path

import pytest

from artifacts.errors import HeldError, LeaseLostError
from artifacts.lease import FOLDER, hold, read_newest
from artifacts.store import Store
from flows.export import export_policy
from flows.holding import hold_run, hold_unless_complete
from flows.record import config_of
from holders import write_lease
from tiny_run import session, train


@pytest.fixture(scope="module")
def done(folder: Path) -> Store:
    """A complete run of three iterations; the policies after the second and third are kept."""
    with session("run=done", "iterations=3") as made:
        train(made)
        return made.store


def files(store: Store) -> list[Path]:
    return sorted(path for path in Path(store.url).rglob("*") if path.is_file())


def test_complete_run_is_not_held_and_a_longer_one_is(done: Store) -> None:
    before = files(done)
    with session("run=done", "iterations=3") as made, hold_unless_complete(made):
        train(made)
    assert files(done) == before
    with session("run=done", "iterations=4") as made, hold_unless_complete(made):
        assert not read_newest(done).released


@pytest.mark.parametrize("version", [2, 3])
def test_run_that_lacks_a_snapshot_that_is_due_is_not_complete(done: Store, version: int) -> None:
    (key,) = done.names(f"policy/{version:06d}")
    path = f"policy/{version:06d}/{key}/manifest.json"
    manifest = done.read(path)
    with session("run=done", "iterations=3") as made:
        assert made.is_complete()
        done.remove(path)
        assert not made.is_complete()
        done.put(path, manifest)
        assert made.is_complete()


def test_export_of_a_kept_policy_waits_for_nobody_and_of_another_is_refused(
    done: Store, tmp_path: Path
) -> None:
    config = config_of(done.url, [])
    with hold(done, 1):
        export_policy(config, str(tmp_path / "kept"), 2, debug=True)
        with pytest.raises(HeldError):
            export_policy(config, str(tmp_path / "rebuilt"), 1, debug=True)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    export_policy(config, str(tmp_path / "rebuilt"), 1, debug=True)
    assert done.names("policy") == ["000001", "000002", "000003"]
    assert read_newest(done).released


def test_overtaken_run_finds_out_before_its_next_stage_writes_anything(folder: Path) -> None:
    with session("run=overtaken") as made, hold_run(made.store, made.config):
        made.rollout(1)
        write_lease(made.store, token=2)
        before = files(made.store)
        with pytest.raises(LeaseLostError, match="taken over by process 4242 on far"):
            made.score(1)
        assert files(made.store) == before
        assert made.store.names(FOLDER) == ["000001.json", "000002.json"]
