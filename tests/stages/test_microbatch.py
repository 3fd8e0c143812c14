"""Masks, ends and what is measured: a micro-batch through a real model, in a group of one."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tiny
from made_samples import samples_of
from stages.logprobs import LogprobModel
from stages.packed import ATTENTION
from stages.update.config import UpdateConfig
from stages.update.microbatch import MicroBatch
from stages.update.sharding import shard_model
from stages.update.step import accumulate_gradients, microbatches_of, plan_step

CPU = torch.device("cpu")
END = 2  # the pad id too, in what follows


@pytest.fixture(scope="module")
def mesh():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


@pytest.fixture
def model(mesh):
    made = tiny.model(layers=1)
    made.set_attn_implementation(ATTENTION)
    return shard_model(LogprobModel(made), mesh, UpdateConfig(dtype="float32"))


def take_step(model, samples, old=None, max_tokens=30, **config):
    """(metrics, plan) of a step whose gradients are then in ``model``."""
    config = UpdateConfig(**config, dtype="float32")
    step = plan_step(samples, range(len(samples)), config)
    microbatches = microbatches_of(samples, step.units, max_tokens, 0, 1)
    return accumulate_gradients(model, samples, step, microbatches, old, config, 1.0).reduce(), step


def test_answer_of_several_turns_has_a_loss_term_for_each_sampled_token():
    # Three sampled, a newline, five of a tool, a header, two sampled, a newline.
    mask = [int(c) for c in "1110000000110"]
    samples = samples_of([list(range(4, 17))], masks=[mask])
    batch = MicroBatch.of(samples, [0], None, CPU, {0: 0.2})
    assert batch.scale_N.tolist() == pytest.approx([0.2 * m for m in mask])
    assert batch.packed.targets_n.tolist() == list(range(4, 17))


def test_answer_of_four_tokens_has_four_loss_terms(model):
    samples = samples_of([[7, 8, 9, 10]])
    batch = MicroBatch.of(samples, [0], None, CPU, {0: 0.25})
    assert len(batch.packed.sources_n) == np.count_nonzero(batch.scale_N) == 4
    prompt = samples.sequences[0][0]
    # The last token of the prompt predicts the first one sampled.
    assert batch.packed.sources_n.tolist()[0] == len(prompt) - 1
    assert take_step(model, samples)[0]["update/trained_tokens"] == 4


def test_end_tokens_count_though_their_id_is_that_of_padding(model):
    samples = samples_of([[8, 9, END], [8, 9, 6, 6, 6], [END], []])
    metrics, step = take_step(model, samples)
    assert step.units == [(0,), (1,), (2,)]
    assert metrics["update/trained_tokens"] == 3 + 5 + 1
    batch = MicroBatch.of(samples, [0, 2], None, CPU, step.scale)
    assert (batch.scale_N > 0).tolist() == [True] * 4


def test_step_of_empty_answers_has_nothing_to_do(model):
    samples = samples_of([[], []])
    assert plan_step(samples, range(2), UpdateConfig(kl_coef=0.1)).units == []


def test_what_a_tool_wrote_changes_nothing(model):
    def gradients(column):
        samples = samples_of([[5, 6, 7, 8]], masks=[[1, 0, 0, 1]])
        samples.sampler_logprobs[0][1:3] = column
        old = [np.array([-1, column, column, -1], np.float32)]
        metrics, _ = take_step(model, samples, old, loss="gspo", correction="tis")
        found = [p.grad.full_tensor().clone() for p in model.parameters()]
        model.zero_grad()
        return metrics, found

    (plain, expected), (strange, got) = gradients(0.0), gradients(-1e30)
    assert plain == strange
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert all(torch.isfinite(g).all() for g in got)


def test_fifty_steps_that_reward_short_answers_raise_the_chance_of_the_end(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    random = torch.Generator().manual_seed(0)
    chances = []
    for _ in range(50):
        responses, first = sample_answers(model, random)
        chances.append(first[END].item())
        rewards = np.array([-len(r) for r in responses], dtype=float)
        if rewards.std() == 0:
            continue
        samples = samples_of(responses, advantages=(rewards - rewards.mean()) / rewards.std())
        take_step(model, same_prompts(samples), max_tokens=100)
        optimizer.step()
        optimizer.zero_grad()
    assert chances[0] < 0.1 < 0.9 < chances[-1]


PROMPT = [1, 5]


def same_prompts(samples):
    samples.sequences[:] = [(PROMPT, response) for _, response in samples.sequences]
    return samples


def sample_answers(model, random, count=16, limit=5):
    """Answers of the model to one prompt, and its distribution over their first token."""
    rows, first = torch.tensor([PROMPT] * count), None
    plain = tiny.model(layers=1)
    weights = {n: p.full_tensor() for n, p in model.model.named_parameters()}
    plain.load_state_dict(weights, strict=False)
    for _ in range(limit):
        with torch.no_grad():
            p = plain(input_ids=rows).logits[:, -1].softmax(-1)
        first = p[0] if first is None else first
        rows = torch.cat([rows, torch.multinomial(p, 1, generator=random)], dim=1)
    answers = [row[len(PROMPT) :] for row in rows.tolist()]
    return [a[: a.index(END) + 1] if END in a else a for a in answers], first


USER_LOSS = """
import torch
from stages.update.loss_inputs import TokenLoss

def mine(inputs, config):
    loss_N = -inputs.advantages_N * inputs.logprobs_N
    return TokenLoss(loss_N, {"seen": inputs.advantages_N})

def short(inputs, config):
    return TokenLoss(inputs.logprobs_N.sum())

def bare(inputs, config):
    return inputs.logprobs_N
"""


@pytest.fixture
def user(tmp_path):
    (tmp_path / "mine.py").write_text(USER_LOSS)
    return f"{tmp_path}/mine.py"


def test_metric_of_a_users_loss_is_one_mean_over_the_step(model, user):
    # Five scores in micro-batches of 2, 2 and 1: 0.6, and not a mean of means.
    samples = samples_of([[4], [5], [6], [7], [8]], advantages=[1, 0, 1, 1, 0])
    for max_tokens in (1, 10, 100):
        metrics, _ = take_step(model, samples, max_tokens=max_tokens, loss=f"{user}:mine")
        assert metrics["update/seen"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("name", "message"),
    [("short", r"loss_N of shape \(\), and there are 2 tokens"), ("bare", "return a TokenLoss")],
)
def test_users_loss_that_gives_no_value_a_token_is_refused(model, user, name, message):
    with pytest.raises((TypeError, ValueError), match=message):
        take_step(model, samples_of([[4, 5]]), loss=f"{user}:{name}")


def test_empty_micro_batch_adds_nothing(model):
    samples = samples_of([[4, 5], [6]])
    config = UpdateConfig(dtype="float32", kl_coef=0.0)
    step = plan_step(samples, range(2), config)
    found = []
    for microbatches in ([[0, 1]], [[], [0, 1], []], [[0], [], [1]]):
        metrics = accumulate_gradients(model, samples, step, microbatches, None, config, 1.0)
        gradient = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
        model.zero_grad()
        found.append((metrics.reduce(), gradient))
    for metrics, gradient in found[1:]:
        assert metrics == pytest.approx(found[0][0], rel=1e-5)
        assert (gradient - found[0][1]).norm() < 1e-5 * found[0][1].norm()


def test_mismatch_of_engine_and_trainer_is_measured_by_hand(model):
    samples = samples_of([[4, 5], [6, 7]], masks=[[1, 1], [1, 0]])
    gaps = [0.5, -0.2, 0.1]  # sampler less trainer
    old = [s + g for s, g in zip(samples.sampler_logprobs, ([-0.5, 0.2], [-0.1, 9.0]), strict=True)]
    old = [np.array(o, np.float32) for o in old]
    metrics, _ = take_step(
        model, samples, old, correction="mis", correction_cap=1.1, correction_floor=0.7
    )
    weights = np.exp(-np.array(gaps))
    assert metrics["mismatch/k1"] == pytest.approx(np.mean(gaps), rel=1e-5)
    assert metrics["mismatch/k3"] == pytest.approx(np.mean(weights - 1 + gaps), rel=1e-5)
    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx(0.8 / 3, rel=1e-5)
    assert metrics["mismatch/logprob_abs_max"] == pytest.approx(0.5, rel=1e-5)
    size = weights.sum() ** 2 / (3 * (weights**2).sum())
    assert metrics["mismatch/effective_sample_size"] == pytest.approx(size, rel=1e-5)
    # 0.607 and 1.221 are out of bounds: of three tokens one is left.
    assert metrics["mismatch/masked_share"] == pytest.approx(2 / 3)
    assert metrics["mismatch/weight_mean"] == pytest.approx(weights[2] / 3, rel=1e-5)
    assert metrics["mismatch/corrected_sample_size"] == pytest.approx(1 / 3)
