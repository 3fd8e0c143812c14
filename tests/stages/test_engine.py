"""Every engine: what it samples, and that new weights are really the ones it samples with."""

import numpy as np
import pyarrow as pa
import pytest
import torch

import tiny
from artifacts.shards import read_shard
from artifacts.store import Store
from stages.arrays import array_of
from stages.ray_cluster import RayCluster
from stages.rollout.config import RolloutConfig
from stages.rollout.engines import Engines
from stages.rollout.worker import Finished, PolicyName, ShardOrder
from stages.workers import Done, Placement, WorkerDiedError

pytestmark = pytest.mark.real

SETTINGS = {"max_new_tokens": 12, "temperature": 0.7, "dtype": "float32", "samples_per_prompt": 4}
BASE, NEXT = PolicyName(0, "base"), PolicyName(1, "next")
KINDS = {"tied": {"tied": True}, "untied": {"tied": False, "kind": "qwen2"}}
CASES = [(engine, kind) for engine in ("vllm", "hf") for kind in KINDS]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Each engine for a tied and an untied model, starting side by side."""
    cluster = RayCluster(None)
    pools = {}
    for engine, kind in [*CASES, ("vllm", "deterministic"), ("hf", "deterministic")]:
        folder = tiny.save_model(tmp_path_factory.mktemp(kind), **KINDS.get(kind, {}))
        config = RolloutConfig(engine=engine, deterministic=kind not in KINDS, **SETTINGS)
        place = Placement(threads=1)
        pools[engine, kind] = Engines(cluster, str(folder), BASE, config, 64, 1, place)
        pools[engine, kind].start()
    yield pools
    cluster.shutdown()


def orders(count=6):
    return [
        ShardOrder(
            index,
            [
                {
                    "sample_id": f"{index}-{k}",
                    "group_id": str(index),
                    "prompt_id": "p",
                    "source": "data",
                    "row": 0,
                    "epoch": 0,
                    "sample_index": k,
                    "seed": 1000 * index + k,
                    "prompt_ids": [1, 5 + index, 6, 7],
                    "prompt_text": "",
                    "messages": None,
                    "ground_truth": None,
                    "extra": "{}",
                }
                for k in range(4)
            ],
        )
        for index in range(count)
    ]


def sample(engines, store, folder, policy):
    shards = {
        event.index: event.shard
        for event in engines.generate(store, folder, policy, orders())
        if isinstance(event, Finished)
    }
    return pa.concat_tables(read_shard(store, folder, shards[i]) for i in sorted(shards))


def gap(model, table):
    """Largest distance of the engine's log-probs from a plain forward of ``model``."""
    worst = 0.0
    for row in table.to_pylist():
        prompt, response = row["prompt_ids"], row["response_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0] / 0.7
        places = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
        expected = logits.log_softmax(-1)[places, torch.tensor(response)].numpy()
        worst = max(worst, float(np.abs(expected - np.array(row["logprobs"])).max()))
    return worst


@pytest.mark.parametrize(("engine", "kind"), CASES)
def test_engine_after_new_weights_samples_from_them_and_from_nothing_else(
    engine, kind, engines, tmp_path
):
    store = Store(str(tmp_path))
    pool = engines[engine, kind]
    before = sample(pool, store, "a", BASE)
    again = sample(pool, store, "b", BASE)
    assert before.equals(again)
    assert gap(tiny.model(**KINDS[kind]), before) < 1e-4
    assert set(before["finish_reason"].to_pylist()) <= {"stop", "length"}
    for row in before.to_pylist():
        assert len(row["response_ids"]) == len(row["logprobs"]) == sum(row["loss_mask"])
        ended = row["response_ids"][-1] == 2
        assert ended == (row["finish_reason"] == "stop")

    other = tiny.model(**KINDS[kind], seed=1)
    weights = {n: array_of(p) for n, p in other.named_parameters()}
    with pytest.raises(RuntimeError, match="the engine holds"):
        sample(pool, store, "c", NEXT)
    pool.load(NEXT, Done(weights))
    after = sample(pool, store, "c", NEXT)
    assert gap(other, after) < 1e-4
    assert gap(tiny.model(**KINDS[kind]), after) > 0.1
    assert set(after["policy_digest"].to_pylist()) == {"next"}


@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_shard_of_a_deterministic_rollout_is_the_same_beside_any_others(engine, engines, tmp_path):
    pool, store = engines[engine, "deterministic"], Store(str(tmp_path))

    def digests(folder, wanted):
        events = pool.generate(store, folder, BASE, wanted)
        return {e.index: e.shard.digest for e in events if isinstance(e, Finished)}

    every = digests("all", orders())
    assert digests("two", orders()[4:2:-1]) == {index: every[index] for index in (3, 4)}
    assert digests("one", orders()[3:4]) == {3: every[3]}


def test_engine_killed_under_a_call_is_a_worker_death_and_the_next_call_starts_afresh(
    engines, tmp_path
):
    pool = engines["vllm", "tied"]
    store = Store(str(tmp_path))
    stream = pool.generate(store, "d", NEXT, orders())
    next(stream)
    pool._actors[0].kill()
    with pytest.raises(WorkerDiedError):
        list(stream)
    assert not pool.holds(NEXT)
    assert len(sample(pool, store, "d", BASE)) == 24
