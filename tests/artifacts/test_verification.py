"""Verification finds what is wrong with a run, says where, and finds nothing in a whole one."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from artifacts.manifests import Ref
from artifacts.runs import write_record
from artifacts.shards import read_table
from artifacts.store import Store
from artifacts.verification import verify
from flows.cli import main
from handmade import commit, commit_iteration
from stages.contract import Work


@pytest.fixture
def run(tmp_path):
    store = Store(str(tmp_path / "run"))
    write_record(store, {})
    rollout, scores = commit_iteration(store, 1, nulls=0)
    return store, rollout, scores


def path_of(store, committed, shard=0):
    return Path(store.locate(f"{committed.folder}/{committed.manifest.shards[shard].name}"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a flipped byte": (flip, "expected digest"),
    "a cut file": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "expected digest"),
    "a missing file": (Path.unlink, "no file"),
}


def test_verify_of_a_whole_run_reads_everything_and_finds_nothing(run):
    found = verify(run[0])
    assert found.problems == []
    assert (found.manifests, found.files) == (2, 4)


@pytest.mark.parametrize("name", DAMAGE)
def test_verify_names_the_file_that_is_not_what_its_manifest_says(run, name):
    store, _, scores = run
    damage, words = DAMAGE[name]
    path = path_of(store, scores, 1)
    damage(path)
    (problem,) = verify(store).problems
    assert path.name in problem
    assert words in problem


def test_verify_names_a_manifest_that_was_edited(run):
    store, rollout, _ = run
    path = Path(store.locate(f"{rollout.folder}/manifest.json"))
    path.write_text(path.read_text().replace('"stage_version": 1', '"stage_version": 2'))
    problems = verify(store).problems
    assert any(rollout.folder in problem and "content digest" in problem for problem in problems)
    assert any("its input rollout" in problem for problem in problems)


def test_verify_names_an_input_that_is_gone(run):
    store, rollout, scores = run
    Path(store.locate(f"{rollout.folder}/manifest.json")).unlink()
    (problem,) = verify(store).problems
    assert problem.startswith(f"{scores.folder}: its input rollout")


def column(table, name, values):
    return table.set_column(
        table.column_names.index(name), name, pa.array(values, table[name].type)
    )


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda t: column(t, "logprobs", [[np.nan] * len(v) for v in t["logprobs"].to_pylist()]),
         "logprobs holds NaN"),
        (lambda t: column(t, "loss_mask", [[1]] * t.num_rows), "loss_mask has not one entry"),
        (lambda t: column(t, "sample_id", ["same"] * t.num_rows), "stands twice"),
        (lambda t: t.slice(1), "has 3 samples, not 4"),
    ],
)  # fmt: skip
def test_verify_names_a_rollout_that_breaks_an_invariant(run, break_it, words):
    store, rollout, _ = run
    table = read_table(store, rollout.folder, rollout.manifest)
    identity = {"samples_per_prompt": 4}
    work = Work("rollouts", "rollout", 1, 2, identity, {"policy": Ref("model", "0" * 64)})
    made = commit(store, work, break_it(table))
    (problem,) = verify(store).problems
    assert problem.startswith(made.folder)
    assert words in problem


def test_verify_names_scores_of_other_samples_and_infinite_rewards(run):
    store, rollout, scores = run
    table = read_table(store, scores.folder, scores.manifest)
    turned = column(table, "sample_id", table["sample_id"].to_pylist()[::-1])
    turned = column(turned, "reward", [np.inf] * table.num_rows)
    work = Work("scores", "score", 1, 2, {}, {"rollout": rollout.ref})
    commit(store, work, turned)
    problems = verify(store).problems
    assert [problem.split(": ", 1)[1] for problem in problems] == [
        "reward holds NaN or an infinity",
        "its samples are not those of its rollout, in order",
    ]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_verify_command_exits_with_three_only_where_something_is_wrong(
    run, is_damaged, monkeypatch, capsys
):
    store, rollout, _ = run
    if is_damaged:
        flip(path_of(store, rollout))
    monkeypatch.setattr(sys, "argv", ["ratchet", "verify", store.url])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (3 if is_damaged else 0)
    assert ("whole: 2 manifests" in capsys.readouterr().out) is not is_damaged
