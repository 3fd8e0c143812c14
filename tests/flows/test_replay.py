"""``ratchet replay``: what an update committed, made again from what it was made of."""

import json
import shutil

import pyarrow as pa
import pytest

from artifacts.branches import open_store
from artifacts.manifests import Manifest, Ref, read_manifest, write_manifest
from artifacts.runs import committed
from artifacts.schemas import STEPS
from artifacts.shards import read_shard, write_table
from flows.cli import main
from flows.replay import metric_differences, replay
from stages.update.trainers import policy_work
from tiny_run import session, train


@pytest.fixture(scope="module")
def whole(folder):
    with session() as made:
        train(made)
    return f"{folder}/runs/whole"


def ratchet(monkeypatch, capsys, *args):
    monkeypatch.setattr("sys.argv", ["ratchet", *args])
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    return code, capsys.readouterr()


@pytest.mark.parametrize(("iteration", "replayed"), [(1, 0), (2, 1), (3, 0), (4, 1)])
def test_replay_of_an_undisturbed_update_is_equal_bit_by_bit(whole, iteration, replayed):
    found = replay(whole, iteration, debug=True)
    assert found.differences == found.layout == []
    assert found.replayed == replayed  # snapshots lie after 2 and 4
    ((_, manifest),) = committed(open_store(whole), iteration, "update")
    assert found.weights_digest == manifest.outcome["weights_digest"]
    assert found.metrics > 20
    assert found.tensors > 10


NOISY = """
import random
import numpy as np
import torch
from stages.update.loss_inputs import TokenLoss

def noisy(inputs, config):
    noise = 1 + random.random() + float(np.random.rand()) + torch.rand(())
    return TokenLoss(-noise * inputs.advantages_N * inputs.logprobs_N)
"""


def test_replay_of_an_update_whose_loss_draws_random_numbers_draws_the_same(folder):
    (folder / "noisy.py").write_text(NOISY)
    noisy = ("run=noisy", "iterations=2", "update.loss=noisy.py:noisy")
    with session(*noisy) as made:
        train(made)
    assert replay(f"{folder}/runs/noisy", 2, debug=True).differences == []


def test_replay_writes_nothing(whole, folder):
    before = sorted(p for p in (folder / "runs").rglob("*"))
    replay(whole, 3, debug=True)
    assert sorted(p for p in (folder / "runs").rglob("*")) == before


def test_replay_under_another_layout_names_it_beside_what_moved(whole):
    found = replay(whole, 2, ["update.max_tokens_per_rank=16"], debug=True)
    assert found.layout == ["max_tokens_per_rank: 8192 → 16"]


def forge(url, iteration):
    """Commit, in place of an update, one of other metrics and weights, all its digests right."""
    store = open_store(url)
    ((folder, manifest),) = committed(store, iteration, "update")
    steps, tensors = (read_shard(store, folder, s) for s in manifest.shards[1:])
    rows = [
        {**row, "value": row["value"] + 0.5} if row["name"] == "update/loss" else row
        for row in steps.to_pylist()
    ]
    forged = [
        write_table(store, folder, "steps", pa.Table.from_pylist(rows, schema=STEPS)),
        write_table(store, folder, "tensors", _with_other_norm(tensors)),
    ]
    parts = {**vars(manifest), "shards": (manifest.shards[0], *forged)}
    parts["outcome"] = {**manifest.outcome, "weights_digest": "0" * 64}
    store.remove(f"{folder}/manifest.json")
    write_manifest(store, folder, Manifest(**parts))


def _with_other_norm(tensors):
    rows = tensors.to_pylist()
    rows[3] = {**rows[3], "norm": rows[3]["norm"] * 2, "digest": "f" * 64}
    return pa.Table.from_pylist(rows, schema=tensors.schema)


def test_replay_of_a_forged_update_names_metric_and_tensor_and_how_far_they_are(
    whole, folder, monkeypatch, capsys
):
    shutil.copytree(whole, folder / "runs" / "forged")
    forge(f"{folder}/runs/forged", 4)
    name = sorted(replay_names(whole))[3]
    code, out = ratchet(monkeypatch, capsys, "replay", "runs/forged", "--iteration", "4", "--debug")
    assert code == 3
    assert "step 7, update/loss: committed" in out.out
    assert "by 0.5 " in out.out
    assert f"tensor {name}: norm committed" in out.out
    assert "weights digest: committed 0000" in out.out
    code, out = ratchet(
        monkeypatch, capsys, "replay", "runs/forged", "--iteration", "4", "--debug", "--json"
    )
    assert code == 3
    assert len(json.loads(out.out)["differences"]) == 4  # the loss of both steps


def replay_names(url):
    ((folder, manifest),) = committed(open_store(url), 4, "update")
    return read_shard(open_store(url), folder, manifest.shards[2])["name"].to_pylist()


def test_distances_from_a_snapshot_are_zero_for_its_own_policy_alone(whole):
    with session() as made:
        made.recall_finished()
        store, trainers = made.store, made.pools.trainers
        folder = policy_work(made.history[3]).folder
        snapshot = Ref(folder, read_manifest(store, folder).digest)
        trainers.bring_to(store, made.history)
        assert set(trainers.distances(store, snapshot).values()) == {0.0}
        trainers.bring_to(store, made.history[:3])
        assert 0 < max(trainers.distances(store, snapshot).values()) < 0.01


def test_replay_of_an_iteration_that_is_not_there_is_refused(whole, monkeypatch, capsys):
    code, out = ratchet(monkeypatch, capsys, "replay", whole, "--iteration", "9", "--debug")
    assert code == 2
    assert "has finished 4 iterations" in out.err


def test_metric_differences_take_nan_for_equal_to_nan_and_name_what_is_missing():
    def table(*rows):
        return pa.Table.from_pylist(
            [dict(zip(("step", "name", "value"), row, strict=True)) for row in rows], schema=STEPS
        )

    stored = table((1, "a", float("nan")), (1, "b", 2.0), (2, "b", 4.0))
    made = table((1, "a", float("nan")), (1, "b", 2.0), (2, "b", 5.0), (2, "c", 1.0))
    assert metric_differences(stored, made) == [
        "step 2, b: committed 4.0, replayed 5.0, by 1 (0.25 of it)",
        "step 2, c: committed None, replayed 1.0",
    ]
