"""A run whose configuration changes on the way, and runs that branch from another."""

import json
from pathlib import Path

import pytest

from artifacts.branches import open_store
from artifacts.manifests import read_manifest
from artifacts.runs import committed
from artifacts.verification import verify
from flows.branch import branch
from flows.cli import main
from flows.config import UserError
from tiny_run import STAGES, digests, session, train


@pytest.fixture(scope="module")
def whole(folder):
    """The run that nobody disturbs: four iterations."""
    with session() as made:
        train(made)
    return f"{folder}/runs/whole"


def times(run):
    """When each file of a run was last written; of pins, nothing."""
    found = [p for p in Path(run).rglob("*") if p.is_file() and p.parent.name != "pins"]
    return {path: path.stat().st_mtime_ns for path in found}


def ratchet(monkeypatch, capsys, *args):
    monkeypatch.setattr("sys.argv", ["ratchet", *args])
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    return code, capsys.readouterr()


def test_run_whose_session_ends_between_iterations_goes_on_to_the_same_bytes(whole, folder):
    with session("run=halves") as first:
        train(first, until=2)
    with session("run=halves") as second:
        assert second.recall_finished() == 2
        train(second)
    assert digests(f"{folder}/runs/halves") == digests(whole)


def test_changed_identity_is_refused_with_each_field_its_stages_and_the_iteration(whole):
    with (
        pytest.raises(UserError) as refused,
        session("iterations=5", "update.lr=0.002", "score.rewards=[{fn: 'rewards.py:short'}]"),
    ):
        pass
    sentence = str(refused.value)
    assert "update.lr: 0.001 → 0.002 (update from iteration 5 on)" in sentence
    assert "score.rewards" in sentence
    assert "(score, update from iteration 5 on)" in sentence
    assert "--allow-change" in sentence


def test_run_under_an_allowed_change_keeps_what_was_made_and_makes_the_rest_anew(folder):
    with session("run=changed", "iterations=2") as made:
        train(made)
    url = f"{folder}/runs/changed"
    before = digests(url)
    with session("run=changed", "update.lr=0.002", allow_change=True) as made:
        assert made.recall_finished() == 2
        train(made)
    assert {place: d for place, d in digests(url).items() if place[0] <= 2} == before
    rates = {i: committed(open_store(url), i, "update")[0][1].identity["lr"] for i in (1, 2, 3, 4)}
    assert rates == {1: 0.001, 2: 0.001, 3: 0.002, 4: 0.002}
    (revision,) = Path(url, "revisions").iterdir()
    assert json.loads(revision.read_text())["changed"] == ["update.lr: 0.001 → 0.002"]
    # From now on the changed configuration is the run's own, and what came before is still found.
    with session("run=changed", "update.lr=0.002") as made:
        assert made.recall_finished() == 4
    assert verify(open_store(url)).problems == []


def test_model_of_a_run_is_never_changed(whole, folder):
    import tiny

    tiny.save_model(folder / "other", seed=3)
    with (
        pytest.raises(UserError, match="the model stays the same"),
        session("model=other", allow_change=True),
    ):
        pass


def test_branch_shares_its_parents_past_and_goes_its_own_way(whole, folder):
    before = times(whole)
    url = branch(whole, 3, "child", ["update.lr=0.002"])
    with session("run=child", "update.lr=0.002") as made:
        assert made.recall_finished() == 3
        train(made)
    theirs, ours = digests(whole), digests(url)
    assert {p: d for p, d in ours.items() if p[0] <= 3} == {
        p: d for p, d in theirs.items() if p[0] <= 3
    }
    # Only the rate changed: the samples of iteration 4 are the same ones, made by the child itself.
    assert ours[4, "rollout"] == theirs[4, "rollout"]
    assert ours[4, "update"] != theirs[4, "update"]
    assert sorted(p.name for p in Path(url).glob("iteration-*")) == ["iteration-000004"]
    assert times(whole) == before
    assert verify(open_store(url)).problems == []


def test_branch_of_nothing_changed_makes_its_parents_very_bytes(whole):
    url = branch(whole, 2, "twin", [])
    with session("run=twin") as made:
        made.recall_finished()
        train(made)
    assert digests(url) == digests(whole)


def test_branch_of_a_branch_reads_through_both_parents(whole):
    branch(whole, 2, "mother", [])
    with session("run=mother") as made:
        made.recall_finished()
        train(made, until=3)
    url = branch(whole.replace("whole", "mother"), 3, "daughter", ["update.lr=0.003"])
    with session("run=daughter", "update.lr=0.003") as made:
        assert made.recall_finished() == 3
        train(made)
    update = committed(open_store(url), 4, "update")[0][1]
    assert update.identity["lr"] == 0.003
    for stage in STAGES[:2]:
        ref = update.inputs["rollout" if stage == "rollout" else "scores"]
        assert read_manifest(open_store(url), ref.path, ref.digest)


def test_runs_moved_together_still_find_their_parents(whole, folder, tmp_path):
    import shutil

    branch(whole, 2, "moving", [])
    shutil.copytree(folder / "runs", tmp_path / "elsewhere")
    store = open_store(f"{tmp_path}/elsewhere/moving")
    assert committed(store, 2, "update")
    assert not committed(store, 3, "update")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--iteration", "9", "--run", "far"], "has finished 4 iterations"),
        (["--iteration", "2", "--run", "whole"], "there is a run at"),
        (["model=other", "--iteration", "2", "--run", "odd"], "a branch keeps the model"),
    ],
)
def test_branch_that_can_not_be_is_refused_in_a_sentence(
    whole,
    folder,
    monkeypatch,
    capsys,
    args,
    sentence,
):
    import tiny

    tiny.save_model(folder / "other", seed=3)
    code, out = ratchet(monkeypatch, capsys, "branch", whole, *args)
    assert code == 2
    assert sentence in out.err
