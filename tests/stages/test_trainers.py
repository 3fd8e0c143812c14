"""The trainer on real gloo ranks, against one process that knows nothing of packing or FSDP."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import handmade
import tiny
from artifacts.errors import IntegrityError
from artifacts.manifests import read_manifest
from artifacts.store import Store
from stages.ray_cluster import RayCluster
from stages.update import run as update_stage
from stages.update.config import UpdateConfig
from stages.update.samples import read_samples
from stages.update.schedule import learning_rate
from stages.update.snapshot import read_tensors
from stages.update.trainer_spec import TrainerSpec, UpdateOrder
from stages.update.trainers import Trainers, layout_of, policy_work
from stages.workers import LocalCluster, Placement, WorkerDiedError

pytestmark = pytest.mark.real

ITERATIONS = 3
TEMPERATURE = 0.8
CONFIG = UpdateConfig(
    minibatches=2,
    kl_coef=0.05,
    lr=1e-3,
    lr_schedule="linear",
    weight_decay=0.1,
    # Where gradients are all but 0, Adam would blow up the last bits of their sums.
    adam_eps=1e-6,
    max_grad_norm=0.5,
    dtype="float32",
    max_tokens_per_rank=40,
)


@pytest.fixture(scope="module")
def ray():
    cluster = RayCluster(None)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.save_model(tmp_path_factory.mktemp("model")))


def spec_of(folder, sp=1):
    total, config = ITERATIONS * CONFIG.minibatches, CONFIG.model_copy(update={"sp": sp})
    return TrainerSpec(folder, config, "drop_sample", TEMPERATURE, total, "float32")


def train(store, trainers, every=1, iterations=ITERATIONS):
    """Run the update stage over handmade iterations; snapshots every so many."""
    history = []
    for iteration in range(1, iterations + 1):
        rollout, scores = handmade.commit_iteration(store, iteration)
        policy = history[-1].ref if history else rollout.manifest.inputs["policy"]
        work = update_stage.update_work(
            iteration, CONFIG, "drop_sample", TEMPERATURE, 6, [(rollout.ref, scores.ref)], policy
        )
        history.append(
            update_stage.run(
                store,
                work,
                list(history),
                rollout.manifest.rows,
                lambda: trainers,
                lambda **_: None,
            )
        )
        if iteration % every == 0:
            update_stage.save_snapshot(store, history[-1], trainers)
    return history


def weights_of(store, update):
    folder = policy_work(update).folder
    return read_tensors(store, folder, read_manifest(store, folder), "weights")


def oracle(folder, store, iterations=ITERATIONS):
    """Weights after each iteration, by the plainest road: a sequence at a time, whole logits."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], weight_decay=0.1, eps=1e-6
    )
    after, norms, finished = [], [], 0
    for iteration in range(1, iterations + 1):
        rollout, scores = handmade.commit_iteration(store, iteration)
        samples = read_samples(store, handmade.inputs_of(rollout, scores), CONFIG, "drop_sample")
        with torch.no_grad():
            old = [logprobs_of(model, s) for s in samples.sequences]
        names = sorted(set(samples.groups))
        for half in (names[:3], names[3:]):
            members = [i for i, g in enumerate(samples.groups) if g in half]
            known = [i for i in members if samples.weights_S[i] > 0]
            total = sum(len(samples.sequences[i][1]) for i in known)
            loss = torch.zeros(())
            for i in known:
                now = logprobs_of(model, samples.sequences[i])
                ratio = (now - old[i]).exp()
                advantage = torch.tensor(samples.advantages[i])
                policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                q = torch.tensor(samples.reference_logprobs[i]) - now
                loss = loss + ((policy + 0.05 * (q.exp() - q - 1)) / total).sum()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(CONFIG, finished, 6)
            optimizer.step()
            optimizer.zero_grad()
            finished += 1
        after.append({n: p.detach().numpy().copy() for n, p in model.named_parameters()})
    return after, norms


def logprobs_of(model, sequence):
    prompt, response = sequence
    logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0].float() / TEMPERATURE
    places = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
    return logits.log_softmax(-1)[places, torch.tensor(response)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_update_on_ranks_gives_the_weights_of_a_plain_loop(ray, folder, tmp_path, ranks):
    store = Store(str(tmp_path))
    trainers = Trainers(ray, spec_of(folder), ranks, Placement())
    history = train(store, trainers)
    expected, norms = oracle(folder, store)
    for update, weights in zip(history, expected, strict=True):
        got = weights_of(store, update)
        assert got.keys() == weights.keys()
        for name, array in weights.items():
            np.testing.assert_allclose(got[name], array, atol=2e-5, rtol=0, err_msg=name)
    first = history[0].manifest.metrics
    assert first["update/grad_norm"] == pytest.approx(np.mean(norms[:2]), rel=1e-4)
    assert first["update/left_out_samples"] == 2
    trainers.drop()


def test_replay_from_an_older_snapshot_by_ranks_that_share_sequences_gives_the_same_digest(
    ray, folder, tmp_path
):
    store = Store(str(tmp_path))
    trainers = Trainers(ray, spec_of(folder, sp=2), 2, Placement())
    history = train(store, trainers, every=2)
    fresh = Trainers(ray, spec_of(folder, sp=2), 2, Placement())
    assert fresh.bring_to(store, history) == 1
    assert fresh.bring_to(store, history) == 0
    # From another number of ranks the snapshot loads too; only the last bits may differ.
    single = Trainers(LocalCluster(), spec_of(folder, sp=2), 1, Placement())
    assert single.bring_to(store, history) == 1
    assert (single.layout["sp"], fresh.layout["sp"]) == (1, 2)
    packed = single.weights().result()
    whole = fresh.weights().result()
    for name, (_, array) in whole.items():
        np.testing.assert_allclose(packed[name][1], array, atol=2e-5, rtol=0, err_msg=name)
    trainers.drop()
    fresh.drop()


def test_update_of_a_version_without_sp_was_made_by_ranks_that_share_nothing(tmp_path):
    rollout, _ = handmade.commit_iteration(Store(str(tmp_path)), 1)
    layout = {"ranks": 2, "max_tokens_per_rank": 40}
    old = replace(rollout.manifest, provenance={"layout": layout})
    assert layout_of(old) == {**layout, "sp": 1}


def test_group_that_loses_a_rank_before_it_meets_fails_at_once(ray, folder, tmp_path):
    trainers = Trainers(ray, spec_of(folder), 2, Placement())
    trainers.start()
    trainers._actors[1].kill()
    # Rank 0 waits for rank 1 for half an hour: whoever waits for rank 0 alone waits with it.
    with pytest.raises(WorkerDiedError):
        trainers.bring_to(Store(str(tmp_path)), [])
    assert trainers.bring_to(Store(str(tmp_path)), []) == 0
    trainers.drop()


def test_replay_of_an_update_that_does_not_fit_its_digest_is_refused(ray, folder, tmp_path):
    store = Store(str(tmp_path))
    trainers = Trainers(ray, spec_of(folder), 1, Placement())
    history = train(store, trainers, every=9, iterations=1)
    history[0].manifest.outcome["weights_digest"] = "0" * 64
    trainers.drop()
    with pytest.raises(IntegrityError, match="weights digest"):
        trainers.bring_to(store, history)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_step_without_any_spread_leaves_the_weights_alone(folder, tmp_path, minibatches):
    store = Store(str(tmp_path))
    config = CONFIG.model_copy(update={"kl_coef": 0.0, "minibatches": minibatches})
    spec = TrainerSpec(folder, config, "drop_sample", TEMPERATURE, 3, "float32")
    trainers = Trainers(LocalCluster(), spec, 1, Placement())
    rollout, scores = handmade.commit_iteration(store, 1, groups=1, nulls=0)
    trainers.bring_to(store, [])
    before = trainers.weights().result()
    policy = rollout.manifest.inputs["policy"]
    work = update_stage.update_work(
        1, config, "drop_sample", TEMPERATURE, 3, [(rollout.ref, scores.ref)], policy
    )
    result = trainers.update(store, UpdateOrder(work.inputs, work.identity))
    after = trainers.weights().result()
    assert result.steps[0]["update/skipped_steps"] == 1
    assert all(np.array_equal(before[name][1], after[name][1]) for name in before)
