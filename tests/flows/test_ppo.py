"""PPO end to end, in this process: the critic scores, learns, is kept, and is made again."""

import gc
import shutil

import numpy as np
import pytest
import torch
import transformers

from artifacts.branches import open_store
from artifacts.manifests import Manifest, Ref, read_manifest, write_manifest
from artifacts.runs import committed
from artifacts.shards import read_shard, read_table
from artifacts.verification import verify
from flows.branch import branch
from flows.config import load_config
from flows.plan import make_plan
from flows.replay import replay
from stages.update.snapshot import read_critic
from stages.update.trainers import policy_work
from stages.update.value_model import ValueModel
from tiny_run import digests, session, train

PPO = ("update.algorithm=ppo", "update.critic.lr=0.002")


@pytest.fixture(scope="module")
def whole(folder):
    with session("run=whole", *PPO) as made:
        train(made)
    return f"{folder}/runs/whole"


def table_of(url, iteration, stage):
    store = open_store(url)
    ((folder, manifest),) = committed(store, iteration, stage)
    return read_table(store, folder, manifest), manifest


def live_critics():
    """How many value models there are in this process."""
    gc.collect()
    return sum(issubclass(type(each), ValueModel) for each in gc.get_objects())


def test_algorithm_alone_decides_whether_a_critic_is_loaded(folder):
    before = live_critics()
    with session("run=one-line", "iterations=2", "update.algorithm=grpo") as made:
        train(made)
        assert live_critics() == before
        grpo = f"{folder}/runs/one-line"
    with session("run=other-line", "iterations=2", "update.algorithm=ppo") as made:
        train(made)
        assert live_critics() == before + 1
        ppo = f"{folder}/runs/other-line"
    for iteration in (1, 2):
        scores, manifest = table_of(grpo, iteration, "score")
        assert scores["values"].null_count == scores.num_rows
        assert "critic" not in manifest.identity.keys() | manifest.inputs.keys()
        (update,) = (m for _, m in committed(open_store(grpo), iteration, "update"))
        assert update.outcome.keys() == {"policy_version", "weights_digest"}
        assert not any("critic" in name for name in (*update.metrics, *update.identity))
        scores, manifest = table_of(ppo, iteration, "score")
        assert scores["values"].null_count == 0
        assert manifest.identity["critic"]["version"] == iteration - 1


@pytest.mark.parametrize(("algorithm", "state"), [("grpo", "not loaded"), ("ppo", "loaded")])
def test_plan_says_whether_a_critic_is_loaded(folder, algorithm, state):
    plan = make_plan(load_config("run.yaml", [f"update.algorithm={algorithm}"]))
    rows = {name: value for name, value, _ in plan.table()}
    assert rows["critic"] == state


@pytest.mark.parametrize("at", [1, 2, 3])
def test_resume_goes_on_as_if_it_had_never_stopped(whole, folder, at):
    # Snapshots lie after 2 and 4: from the base and a replay, from one, from one and a replay.
    with session(f"run=halves-{at}", *PPO) as first:
        train(first, until=at)
    with session(f"run=halves-{at}", *PPO) as second:
        assert second.recall_finished() == at
        train(second)
    assert digests(f"{folder}/runs/halves-{at}") == digests(whole)


@pytest.mark.parametrize(("iteration", "replayed"), [(2, 1), (3, 0)])
def test_replay_is_equal_with_the_critic_bit_by_bit(whole, iteration, replayed):
    found = replay(whole, iteration, debug=True)
    assert found.differences == found.layout == []
    assert found.replayed == replayed
    store = open_store(whole)
    ((folder, manifest),) = committed(store, iteration, "update")
    (shard,) = (s for s in manifest.shards if s.name.startswith("tensors."))
    names = read_shard(store, folder, shard)["name"].to_pylist()
    assert found.tensors == len(names)
    assert "critic.score.weight" in names
    assert sum(name.startswith("critic.") for name in names) * 2 == len(names) + 1


def test_values_in_the_scores_are_those_of_the_kept_critic(whole, folder):
    with session("run=whole", *PPO) as made:
        made.recall_finished()
        kept = policy_work(made.history[1]).folder
    store = open_store(whole)
    saved = read_critic(store, Ref(kept, read_manifest(store, kept).digest))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        "model", num_labels=1, dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(saved.tensors["weights"][name]))
    rollout, _ = table_of(whole, 3, "rollout")
    scores, _ = table_of(whole, 3, "score")
    seen = []
    for prompt, response, values in zip(
        rollout["prompt_ids"].to_pylist(),
        rollout["response_ids"].to_pylist(),
        scores["values"].to_pylist(),
        strict=True,
    ):
        hidden = model.base_model(input_ids=torch.tensor([[*prompt, *response]]))
        plain = model.score(hidden.last_hidden_state[0])[:, 0].detach().numpy()
        expected = plain[len(prompt) - 1 : len(prompt) + len(response) - 1]
        np.testing.assert_allclose(values, expected, atol=1e-5, rtol=0)
        seen += values
    assert np.std(seen) > 1e-3


def test_verify_finds_nothing_wrong_with_a_run_that_has_a_critic(whole):
    assert verify(open_store(whole)).problems == []


def test_verify_finds_a_snapshot_that_has_lost_its_critic(whole, folder):
    shutil.copytree(whole, folder / "runs" / "forged")
    store = open_store(f"{folder}/runs/forged")
    (key,) = store.names("policy/000002")
    place = f"policy/000002/{key}"
    manifest = read_manifest(store, place)
    kept = tuple(s for s in manifest.shards if not s.name.startswith("critic_weights"))
    store.remove(f"{place}/manifest.json")
    write_manifest(store, place, Manifest(**{**vars(manifest), "shards": kept}))
    assert verify(store).problems == [f"{place}: it has no critic_weights"]


def test_critic_begins_anew_after_iterations_without_one(folder):
    changes = [(1, "ppo"), (2, "grpo"), (4, "ppo")]
    for until, algorithm in changes:
        with session("run=turns", f"update.algorithm={algorithm}", allow_change=True) as made:
            made.recall_finished()
            train(made, until=until)
    url = f"{folder}/runs/turns"
    found = [table_of(url, n, "score")[1].identity.get("critic") for n in (1, 2, 3, 4)]
    assert [critic and critic["version"] for critic in found] == [0, None, 0, 1]
    # The newest snapshot is behind it and the configuration has a critic again: made all the same.
    for iteration in (1, 2, 4):
        assert replay(url, iteration, debug=True).differences == []


def test_replay_of_an_update_with_a_critic_under_an_algorithm_without_finds_its_model(folder):
    for until, algorithm in ((1, "ppo"), (2, "grpo")):
        with session("run=left", f"update.algorithm={algorithm}", allow_change=True) as made:
            made.recall_finished()
            train(made, until=until)
    assert replay(f"{folder}/runs/left", 1, debug=True).differences == []


def test_branch_takes_the_critic_of_its_parent_on(whole, folder):
    branch(whole, 3, "child", [])
    with session("run=child", *PPO) as made:
        assert made.recall_finished() == 3
        train(made)
    assert digests(f"{folder}/runs/child")[4, "update"] == digests(whole)[4, "update"]
