"""Runs with a real engine and trainer, after ``ratchet gc``: they go on as if it had never been."""

from pathlib import Path

import pytest

from artifacts.branches import open_store
from artifacts.collection import collect, plan_collection
from artifacts.errors import RetiredError
from artifacts.keep_rules import parse_rule
from artifacts.listing import walk
from artifacts.pins import read_pins, write_pin
from artifacts.verification import verify
from flows.branch import branch
from flows.cli import main
from flows.config import UserError
from flows.replay import replay
from flows.samples import join_iteration
from flows.status import snapshots
from stages.update.trainers import policy_work
from tiny_run import digests, session, train


@pytest.fixture(scope="module")
def whole(folder):
    """The run that nobody disturbs: six iterations, a snapshot after each second."""
    with session("iterations=6") as made:
        train(made)
    return f"{folder}/runs/whole"


def ratchet(monkeypatch, capsys, *args):
    monkeypatch.setattr("sys.argv", ["ratchet", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr()


def gc(url, *rules):
    store = open_store(url)
    collect(store, plan_collection(store, [parse_rule(rule) for rule in rules]))


def make(folder, name, until=4):
    """A run of its own, ``until`` iterations far."""
    with session("iterations=6", f"run={name}") as made:
        train(made, until=until)
    return f"{folder}/runs/{name}"


def test_run_goes_on_after_gc_to_the_bytes_of_the_one_that_nobody_disturbed(whole, folder):
    url = make(folder, "further", until=5)
    gc(url, "last=1")  # policy 5: from snapshot 4 and the samples of 5
    with session("iterations=6", "run=further") as made:
        assert made.recall_finished() == 5
        train(made)
    assert digests(url) == digests(whole)
    assert snapshots(open_store(url)) == [4, 6]
    found = verify(open_store(url))
    assert (found.problems, found.retired) == ([], 4 * 3 + 1)


def test_run_is_gone_through_from_its_beginning_after_gc_and_makes_nothing_again(whole, folder):
    url = make(folder, "again", until=6)
    gc(url, "last=1")
    before = walk(open_store(url))
    # More snapshots are due now, of policies that were let go of.
    with session("iterations=6", "run=again", "checkpoint.every=1") as made:
        train(made)
    assert walk(open_store(url)) == before


def test_policy_between_kept_snapshots_is_rebuilt_after_gc_to_the_same_digest(whole, folder):
    url = make(folder, "between", until=6)
    gc(url, "version=3")
    with session("iterations=6", "run=between") as made:
        made.recall_all(before=4)
        kept = made.snapshot_now()
        weights = made.history[-1].manifest.outcome["weights_digest"]
        assert kept.manifest.outcome["weights_digest"] == weights
    # What an auditor asks of a kept policy: the samples that it was trained on.
    table = join_iteration(made.store, made.iterations[3])
    assert table.num_rows == 4 * 3
    assert {"text", "reward", "advantage"} <= set(table.column_names)


def test_export_and_replay_of_what_was_let_go_end_with_a_sentence_and_two(
    whole, folder, monkeypatch, capsys
):
    url = make(folder, "gone")
    gc(url, "last=1")
    for iteration in (1, 2, 3):
        to = str(folder / f"gone-{iteration}")
        args = ("export", url, "--iteration", str(iteration), "--to", to, "--debug")
        code, out = ratchet(monkeypatch, capsys, *args)
        assert code == 2
        assert "was retired by ratchet gc at" in out.err.splitlines()[-1]
        assert "Traceback" not in out.err
        assert not list(folder.glob("gone-*"))
    code, out = ratchet(monkeypatch, capsys, "export", url, "--to", str(folder / "kept"), "--debug")
    assert code == 0
    assert (folder / "kept" / "config.json").exists()
    with pytest.raises(RetiredError, match="iteration-000003"):
        replay(url, 3, debug=True)


def test_branch_keeps_what_it_needs_of_its_parent_from_gc(whole, folder):
    url = make(folder, "parent")
    child = branch(url, 3, "child", ["update.lr=0.002"])
    (pin,) = read_pins(open_store(url))
    assert (pin.name, pin.by, pin.policies) == ("child-000003", "../child", (3,))
    gc(url, "last=1")
    with session("iterations=6", "run=child", "update.lr=0.002") as made:
        assert made.recall_finished() == 3
        train(made, until=5)
    assert verify(open_store(child)).problems == []
    # The child's own collection takes from the child alone.
    before = walk(open_store(url))
    gc(child, "last=1")
    assert walk(open_store(url)) == before
    with session("iterations=6", "run=child", "update.lr=0.002") as made:
        assert made.recall_finished() == 5
        train(made)
    assert verify(open_store(child)).problems == []


def test_branch_from_a_policy_that_was_let_go_is_refused_and_leaves_no_trace(whole, folder):
    url = make(folder, "lost")
    gc(url, "last=1")
    with pytest.raises(UserError, match=r"policy 2 of .* was let go by ratchet gc"):
        branch(url, 2, "orphan", [])
    assert not Path(folder, "runs", "orphan").exists()
    assert read_pins(open_store(url)) == []


def test_pinned_iterations_keep_their_samples_and_so_policies_by_replay(whole, folder):
    url = make(folder, "pinned")
    write_pin(open_store(url), "rescore", iterations=[1, 2])
    gc(url, "last=1")
    with session("iterations=6", "run=pinned") as made:
        made.recall_all(before=3)
        folder_of_2 = policy_work(made.history[1]).folder
        assert Path(url, folder_of_2, "retired.json").exists()
        assert made.pools.trainers.bring_to(made.store, made.history) == 2
