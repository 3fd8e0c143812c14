"""The critic: its values token by token, its steps on real gloo ranks, its place in the chain.

The other road is one sequence at a time through transformers' own classes, in plain loops.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

import handmade
import tiny
from artifacts.errors import IntegrityError
from artifacts.manifests import Ref, read_manifest
from artifacts.shards import read_shard
from artifacts.store import Store
from made_samples import samples_of
from stages.contract import StageError
from stages.models import load_value_model, model_digest
from stages.ray_cluster import RayCluster
from stages.update import run as update_stage
from stages.update.config import CriticConfig, UpdateConfig
from stages.update.critic import Critic
from stages.update.critic_name import CriticName, critic_after
from stages.update.mesh import RankMesh
from stages.update.samples import read_samples
from stages.update.schedule import learning_rate
from stages.update.snapshot import read_critic
from stages.update.trainer_spec import TrainerSpec
from stages.update.trainers import Trainers, policy_work
from stages.workers import LocalCluster, Placement

pytestmark = pytest.mark.real

ITERATIONS = 3
CONFIG = UpdateConfig(
    algorithm="ppo",
    reward_kl_coef=0.0,
    minibatches=2,
    lr=1e-3,
    weight_decay=0.1,
    adam_eps=1e-6,
    dtype="float32",
    max_tokens_per_rank=40,
    critic=CriticConfig(lr=2e-3, lr_schedule="linear", value_clip=0.1, max_grad_norm=0.5),
)
TOTAL = ITERATIONS * CONFIG.minibatches


@pytest.fixture(scope="module")
def ray():
    cluster = RayCluster(None)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.save_model(tmp_path_factory.mktemp("model")))


def save_classifier(folder, kind, labels=1):
    """A random classifier as a Hugging Face folder: a reward model, say."""
    config = tiny.model(layers=2).config
    config.num_labels = labels
    torch.manual_seed(5)
    made = getattr(transformers, kind).from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
        if getattr(made.score, "bias", None) is not None:
            made.score.bias.fill_(0.7)
    made.save_pretrained(folder)
    return str(folder)


def plain_values(model, sequence):
    """(T,) values of the states before a response's tokens, by one plain forward."""
    prompt, response = sequence
    ids = torch.tensor([[*prompt, *response]])
    hidden = model.base_model(input_ids=ids).last_hidden_state[0]
    return model.score(hidden)[len(prompt) - 1 : len(prompt) + len(response) - 1, 0]


@pytest.fixture(scope="module")
def mesh():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return RankMesh.of(torch.device("cpu"), sp=1)


def critic_of_one(folder, mesh, config=CONFIG):
    """A critic on a group of one rank."""
    return Critic(str(folder), "base", config, mesh)


SEQUENCES = [
    (list(range(3, 3 + prompt)), list(range(10, 10 + response)))
    for prompt, response in ((4, 7), (1, 1), (9, 3), (2, 0), (5, 12), (4, 7))
]


@pytest.mark.parametrize("max_tokens", [1, 25, 10_000])
@pytest.mark.parametrize(
    "kind", ["AutoModelForSequenceClassification", "AutoModelForTokenClassification"]
)
def test_values_in_packed_rows_are_those_of_single_sequences(tmp_path, mesh, kind, max_tokens):
    folder = save_classifier(tmp_path, kind)
    values = critic_of_one(folder, mesh).values(SEQUENCES, max_tokens)
    plain = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float64).eval()
    for sequence, found in zip(SEQUENCES, values, strict=True):
        expected = plain_values(plain, sequence).detach().numpy()
        assert found.dtype == np.float32
        assert found.shape == (len(sequence[1]),)
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
    assert np.std(np.concatenate(values)) > 0.1


def test_critic_from_a_language_model_has_its_body_and_values_of_zero(folder, mesh):
    body = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = load_value_model(folder)
    expected = dict(body.base_model.named_parameters())
    found = dict(made.base_model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert made.score.weight.shape == (1, 128)
    values = critic_of_one(folder, mesh).values(SEQUENCES, 40)
    assert not np.concatenate(values).any()


def test_critic_of_a_prompt_that_tells_the_return_comes_to_explain_it(folder, mesh):
    random = np.random.RandomState(3)
    responses = [random.randint(4, 44, n).tolist() for n in random.randint(2, 9, 32)]
    # The prompt's length says what the answer will be worth; its last token adds a little.
    levels = [0.25 * (i % 4) + 0.02 * (i % 5) for i in range(32)]
    samples = samples_of(responses)
    samples = replace(
        samples,
        values=[np.zeros(len(r)) for r in responses],
        returns=[np.full(len(r), level) for r, level in zip(responses, levels, strict=True)],
    )
    config = CONFIG.model_copy(
        update={"critic": CriticConfig(lr=3e-3, value_clip=None), "max_tokens_per_rank": 400}
    )
    critic = critic_of_one(folder, mesh, config)
    shares = [
        critic.learn(samples, range(32), config, 30)["critic/explained_variance"] for _ in range(30)
    ]
    assert shares[0] == 0.0  # of values that are all 0
    assert shares[-1] > 0.9
    # What it says of the samples is what it has learned.
    means = [values.mean() for values in critic.values(samples.sequences, 400)]
    assert np.corrcoef(means, levels)[0, 1] > 0.95


def spec_of(folder, config=CONFIG):
    return TrainerSpec(folder, config, "drop_sample", 0.8, TOTAL, "float32")


def commit_iteration(store, iteration):
    """Handmade scores with values: some 0.3 around 0.4, so that some of them are clipped."""
    random = np.random.RandomState(iteration)

    def with_values(scores):
        for row in scores:
            count = len(row["reference_logprobs"])
            row["values"] = random.normal(0.4, 0.3, count).astype(np.float32)

    return handmade.commit_iteration(store, iteration, change=with_values)


def train(store, trainers, folder, config=CONFIG, every=1, iterations=ITERATIONS):
    """Run the update stage over handmade iterations; snapshots every so many."""
    history = []
    base = model_digest(folder)
    for iteration in range(1, iterations + 1):
        rollout, scores = commit_iteration(store, iteration)
        before = history[-1] if history else None
        work = update_stage.update_work(
            iteration,
            config,
            "drop_sample",
            0.8,
            TOTAL,
            [(rollout.ref, scores.ref)],
            before.ref if before else rollout.manifest.inputs["policy"],
            before=before,
            critic=critic_after(before, base),
        )
        history.append(
            update_stage.run(store, work, list(history), 24, lambda: trainers, lambda **_: None)
        )
        if iteration % every == 0:
            update_stage.save_snapshot(store, history[-1], trainers)
    return history


class PlainCritic:
    """transformers' own class and optimizer, a sequence at a time."""

    def __init__(self, folder):
        self.model = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32
        )
        torch.nn.init.zeros_(self.model.score.weight)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim > 1]},
                {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            weight_decay=0.1,
            eps=1e-6,
        )
        self.finished = 0

    def step(self, samples, members):
        """One optimizer step; returns its metrics."""
        known = [i for i in members if samples.weights_S[i] > 0]
        total = sum(len(samples.sequences[i][1]) for i in known)
        loss, values, returns, clipped = torch.zeros(()), [], [], 0
        for i in known:
            now = plain_values(self.model, samples.sequences[i])
            for value, old, target in zip(now, samples.values[i], samples.returns[i], strict=True):
                bounded = value.clamp(old - 0.1, old + 0.1)
                free, held = (value - target) ** 2, (bounded - target) ** 2
                loss = loss + torch.maximum(free, held) / 2 / total
                clipped += int(held > free)
                values.append(value.item())
                returns.append(target)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        lr = learning_rate(CONFIG.critic, self.finished, TOTAL)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.finished += 1
        values, returns = np.array(values), np.array(returns)
        return {
            "critic/value_loss": loss.item(),
            "critic/value_mean": values.mean(),
            "critic/return_mean": returns.mean(),
            "critic/clipped_share": clipped / total,
            "critic/explained_variance": 1 - (returns - values).var() / returns.var(),
            "critic/grad_norm": float(norm),
            "critic/lr": lr,
            "critic/skipped_steps": 0.0,
            "critic/trained_tokens": total,
        }


def steps_of(store, update):
    """Metrics of each optimizer step of a committed update."""
    (shard,) = (s for s in update.manifest.shards if s.name.startswith("steps."))
    rows = read_shard(store, update.folder, shard).to_pylist()
    steps = sorted({row["step"] for row in rows})
    return [{r["name"]: r["value"] for r in rows if r["step"] == step} for step in steps]


def critic_weights(store, update):
    folder = policy_work(update).folder
    return read_critic(store, Ref(folder, read_manifest(store, folder).digest)).tensors["weights"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_critic_on_ranks_has_the_weights_and_metrics_of_a_plain_loop(ray, folder, tmp_path, ranks):
    store = Store(str(tmp_path))
    # Checkpointed layers run a second time in backward; no number is another for it.
    config = CONFIG.model_copy(update={"activation_checkpointing": ranks == 2})
    trainers = Trainers(ray, spec_of(folder, config), ranks, Placement())
    history = train(store, trainers, folder)
    trainers.drop()
    plain = PlainCritic(folder)
    for iteration, update in enumerate(history, start=1):
        rollout, scores = commit_iteration(store, iteration)
        samples = read_samples(store, handmade.inputs_of(rollout, scores), CONFIG, "drop_sample")
        names = sorted(set(samples.groups))
        for half, found in zip((names[:3], names[3:]), steps_of(store, update), strict=True):
            members = [i for i, group in enumerate(samples.groups) if group in half]
            expected = plain.step(samples, members)
            metrics = {n: v for n, v in found.items() if n.startswith("critic/")}
            assert metrics == pytest.approx(expected, rel=2e-4, abs=2e-6)
            assert 0 < metrics["critic/clipped_share"] < 1
        got = critic_weights(store, update)
        weights = dict(plain.model.named_parameters())
        assert got.keys() == weights.keys()
        for name, parameter in weights.items():
            np.testing.assert_allclose(
                got[name], parameter.detach(), atol=2e-5, rtol=0, err_msg=name
            )
        assert update.manifest.outcome["critic_version"] == iteration


def test_critic_is_rebuilt_from_an_older_snapshot_by_ranks_that_share_sequences_to_the_bit(
    ray, folder, tmp_path
):
    store = Store(str(tmp_path))
    config = CONFIG.model_copy(update={"sp": 2})
    trainers = Trainers(ray, spec_of(folder, config), 2, Placement())
    history = train(store, trainers, folder, every=2)
    rollout, _ = commit_iteration(store, 9)
    asked = (critic_after(history[-1], model_digest(folder)), store, rollout.folder)
    shard = rollout.manifest.shards[0]
    values = trainers.values(*asked, shard)
    trainers.drop()
    fresh = Trainers(ray, spec_of(folder, config), 2, Placement())
    assert fresh.bring_to(store, history) == 1  # would raise for another digest
    rebuilt = fresh.values(*asked, shard)
    assert [v.tobytes() for v in rebuilt] == [v.tobytes() for v in values]
    lengths = [len(r) for r in read_shard(store, rollout.folder, shard)["response_ids"]]
    assert [len(v) for v in values] == lengths
    fresh.drop()
    # One rank that shares nothing makes the last update, and the values, up to their last bits.
    single = Trainers(LocalCluster(), spec_of(folder), 1, Placement())
    assert single.bring_to(store, history) == 1
    for found, value in zip(single.values(*asked, shard), values, strict=True):
        np.testing.assert_allclose(found, value, atol=2e-5, rtol=0)


def test_warmup_moves_the_critic_and_leaves_the_policy(folder, tmp_path):
    store = Store(str(tmp_path))
    config = CONFIG.model_copy(
        update={"critic": CONFIG.critic.model_copy(update={"warmup_iterations": 2})}
    )
    trainers = Trainers(LocalCluster(), spec_of(folder, config), 1, Placement())
    trainers.bring_to(store, [])
    history = train(store, trainers, folder, config)
    policies = [update.manifest.outcome["weights_digest"] for update in history]
    critics = [update.manifest.outcome["critic_digest"] for update in history]
    assert policies[0] == policies[1] != policies[2]
    assert len(set(critics)) == 3
    skipped = [update.manifest.metrics["update/skipped_steps"] for update in history]
    assert skipped == [2, 2, 0]
    assert all(update.manifest.metrics["critic/skipped_steps"] == 0 for update in history)
    # The count is of the critic's updates, so a replay from the middle finds it too.
    trainers.drop()
    assert trainers.bring_to(store, history) == 0


def test_replay_whose_critic_does_not_fit_its_digest_is_refused(folder, tmp_path):
    store = Store(str(tmp_path))
    trainers = Trainers(LocalCluster(), spec_of(folder), 1, Placement())
    history = train(store, trainers, folder, every=9, iterations=1)
    history[0].manifest.outcome["critic_digest"] = "0" * 64
    trainers.drop()
    with pytest.raises(IntegrityError, match="critic digest"):
        trainers.bring_to(store, history)


def test_critic_that_began_as_another_model_is_refused(folder, tmp_path):
    store = Store(str(tmp_path))
    rollout, _ = commit_iteration(store, 1)
    trainers = Trainers(LocalCluster(), spec_of(folder), 1, Placement())
    trainers.bring_to(store, [])
    other = CriticName("1" * 64, 0, "1" * 64)
    with pytest.raises(StageError, match="begins at a model of digest 1111"):
        trainers.values(other, store, rollout.folder, rollout.manifest.shards[0])


def test_values_leave_the_critic_as_it_was_kept(folder, tmp_path):
    store = Store(str(tmp_path))
    trainers = Trainers(LocalCluster(), spec_of(folder), 1, Placement())
    history = train(store, trainers, folder, iterations=1)
    rollout, _ = commit_iteration(store, 9)
    name = critic_after(history[0], model_digest(folder))
    trainers.values(name, store, rollout.folder, rollout.manifest.shards[0])
    kept = policy_work(history[0]).folder
    snapshot = Ref(kept, read_manifest(store, kept).digest)
    distances = trainers.distances(store, snapshot)
    assert "critic.score.weight" in distances
    assert set(distances.values()) == {0.0}


def test_critic_after_an_update_goes_on_only_from_its_own_base(folder, tmp_path):
    store = Store(str(tmp_path))
    base = model_digest(folder)
    trainers = Trainers(LocalCluster(), spec_of(folder), 1, Placement())
    (update,) = train(store, trainers, folder, iterations=1)
    digest = update.manifest.outcome["critic_digest"]
    assert critic_after(None, base) == CriticName(base, 0, base)
    assert critic_after(update, base) == CriticName(base, 1, digest)
    assert critic_after(update, "2" * 64) == CriticName("2" * 64, 0, "2" * 64)


def test_update_of_scores_without_values_is_refused_in_a_sentence(tmp_path):
    store = Store(str(tmp_path))
    rollout, scores = handmade.commit_iteration(store, 1)
    with pytest.raises(StageError, match="the scores hold no values: score again"):
        read_samples(store, handmade.inputs_of(rollout, scores), CONFIG, "drop_sample")


def test_estimator_of_ones_own_that_gives_no_returns_is_refused_with_a_critic(tmp_path):
    source = "def flat(batch):\n    return batch.per_sample(batch.rewards_S)\n"
    (tmp_path / "mine.py").write_text(source)
    config = CONFIG.model_copy(update={"advantage": f"{tmp_path}/mine.py:flat"})
    store = Store(str(tmp_path / "store"))
    rollout, scores = commit_iteration(store, 1)
    with pytest.raises(StageError, match=r"returned no returns, and update\.critic learns them"):
        read_samples(store, handmade.inputs_of(rollout, scores), config, "drop_sample")
