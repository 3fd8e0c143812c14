"""Same samples, same step: whatever the micro-batches, the packing, the order, the ranks, how many
of them share a sequence, the chunks of the log-probs and the checkpointing of activations, a step
has one loss, one gradient and one set of metrics, for every loss with every aggregation and every
correction; and with each family's way to divide heads.

The loss and the gradient are those of plain loops in float64, a sequence at a time.
"""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import plain_losses
from child import start_child
from invariance_cases import (
    CASES,
    LAYOUTS,
    LOSSES,
    SHAPE_CASES,
    SHAPES,
    SHARED,
    SMALL,
    TEMPERATURE,
    VOCABULARY,
    Job,
    samples,
    shape_name,
    with_logprobs,
)

pytestmark = pytest.mark.real

CHILD = """
import sys
from invariance_ranks import main
rank, size, folder, is_thorough = sys.argv[1:]
main(int(rank), int(size), folder, is_thorough == "True")
"""
NAMES = list(CASES)
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def forward(model, sequence):
    """(log-probs, entropies) of the response's tokens, by one plain forward of one sequence."""
    prompt, response = sequence
    logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0] / TEMPERATURE
    table = logits[len(prompt) - 1 : len(prompt) + len(response) - 1].log_softmax(-1)
    chosen = table[torch.arange(len(response)), torch.tensor(response, dtype=torch.long)]
    return chosen, -(table.exp() * table).sum(-1)


class Oracle:
    """Every case's loss and gradient from one float64 forward of each sequence."""

    def __init__(self, folder, shape):
        config = CONFIGS[shape.kind](
            vocab_size=VOCABULARY,
            hidden_size=8 * shape.heads,
            head_dim=8,
            intermediate_size=48,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.2)
        model.save_pretrained(folder)
        self.model = model.double()
        made = samples()
        self.outputs = [forward(self.model, sequence) for sequence in made.sequences]
        now = [logprobs.detach().numpy() for logprobs, _ in self.outputs]
        (Path(folder) / "now.pickle").write_bytes(pickle.dumps(now))
        self.samples, self.old = with_logprobs(made, now)

    def sequence(self, i):
        made, chosen = self.samples, torch.tensor(self.samples.loss_masks[i] > 0)
        now, entropy = self.outputs[i]
        given = (self.old[i], made.sampler_logprobs[i], made.reference_logprobs[i])
        old, sampler, reference = (torch.tensor(v).double()[chosen] for v in given)
        advantage = float(made.advantages[i][0])
        return plain_losses.Sequence(
            now[chosen], entropy[chosen], old, sampler, reference, advantage
        )

    def loss(self, config):
        # Sample 4 has no token and sample 7 no reward.
        taken = [i for i in range(12) if i not in (4, 7)]
        if not config.compares_pairs:
            return plain_losses.step_loss([self.sequence(i) for i in taken], config, 16)
        # Best and worst by reward in each group; 9 comes before 10, which is as bad.
        pairs = [(0, 1), (3, 5), (6, 8), (11, 9)]
        pairs = [tuple(map(self.sequence, pair)) for pair in pairs]
        loss = plain_losses.preference_loss(pairs, config)
        for pair in pairs:
            entropy = torch.cat([s.entropy for s in pair]).mean()
            loss = loss - config.entropy_coef * entropy / len(pairs)
        return loss

    def solve(self, config):
        """(loss, flat gradient), float64."""
        loss = self.loss(config)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()), retain_graph=True)
        return loss.item(), torch.cat([g.flatten() for g in gradients]).numpy()


def computed(folder, size, is_thorough):
    """{(ranks, job): (metrics, gradient)} of groups of 1, 2, 4 ... of ``size`` processes."""
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parent, here.parent.parent)))
    children = [
        start_child(CHILD, rank, size, folder, is_thorough, PYTHONPATH=path) for rank in range(size)
    ]
    for child in children:
        _, errors = child.communicate(timeout=900)
        assert child.returncode == 0, errors
    groups = [ranks for ranks in SHARED if ranks <= size]
    return {
        (ranks, job): found
        for ranks in groups
        for job, found in results_of(ranks, Path(folder)).items()
    }


def results_of(ranks, folder):
    """{job: (metrics, gradient)} of the group of so many ranks."""
    files = [folder / f"results-{ranks}-{rank}.pickle" for rank in range(ranks)]
    parts = [pickle.loads(file.read_bytes()) for file in files]
    # Metrics are the same on all ranks; each has some rows of every gradient.
    assert all(part[key][0] == parts[0][key][0] for part in parts for key in part)
    return {
        key: (metrics, whole([part[key][1] for part in parts]))
        for key, (metrics, _) in parts[0].items()
    }


def whole(ranks):
    """Flat gradient of all parameters, from each rank's rows of each of them."""
    rows = [np.concatenate(parts) for parts in zip(*ranks, strict=True)]
    return np.concatenate([parameter.ravel() for parameter in rows])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("invariance")


@pytest.fixture(scope="module")
def solved(folder):
    """{(shape, case): (loss, gradient)}; the models lie in ``folder`` then."""
    found = {}
    for shape in (SMALL, *SHAPES):
        oracle = Oracle(folder / shape_name(shape), shape)
        for name in NAMES if shape == SMALL else SHAPE_CASES:
            found[shape, name] = oracle.solve(CASES[name])
    return found


SIZES = [pytest.param(4, id="4-ranks"), pytest.param(8, id="8-ranks", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SIZES)
def results(request, folder, solved):
    """Of groups of up to so many ranks; of all cases on all of them where it is slow."""
    for file in folder.glob("meeting-*"):
        file.unlink()
    return computed(folder, request.param, is_thorough=request.param == 8)


def distance(a, b):
    """Relative to the length of ``b``."""
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def of_case(results, shape, name):
    """{(ranks, layout): (metrics, gradient)}: a case, wherever it was computed."""
    found = {
        (ranks, job.layout): result
        for (ranks, job), result in results.items()
        if (job.shape, job.case) == (shape, name)
    }
    assert found
    return found


def check_solved(results, solved, shape, name):
    """Wherever a case was computed, it has the loss and the gradient of plain loops."""
    loss, gradient = solved[shape, name]
    assert np.linalg.norm(gradient) > 1e-3
    for where, (metrics, got) in of_case(results, shape, name).items():
        assert metrics["update/loss"] == pytest.approx(loss, rel=1e-5), where
        assert distance(got, gradient) < 1e-5, where


@pytest.mark.parametrize("name", NAMES)
def test_step_in_any_layout_has_the_loss_and_gradient_of_plain_loops(results, solved, name):
    check_solved(results, solved, SMALL, name)


@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
def test_step_of_any_shape_has_the_loss_and_gradient_of_plain_loops(results, solved, shape):
    for name in {job.case for _, job in results if job.shape == shape}:
        check_solved(results, solved, shape, name)


@pytest.mark.parametrize("name", NAMES)
def test_step_in_any_layout_has_the_metrics_of_one_plain_micro_batch(results, name):
    expected, _ = results[1, Job(SMALL, name, LAYOUTS[0])]
    for where, (metrics, _) in of_case(results, SMALL, name).items():
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-7), where


def test_every_loss_and_shape_is_computed_by_every_grid_of_ranks(results):
    size = max(ranks for ranks, _ in results)
    grids = {(ranks // sp, sp) for ranks in SHARED for sp in SHARED[ranks] if ranks <= size}
    assert grids >= {(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)}
    met = {
        (ranks // job.layout.sp, job.layout.sp, what)
        for ranks, job in results
        for what in (CASES[job.case].loss, shape_name(job.shape))
    }
    assert {(*grid, loss) for grid in grids for loss in (*LOSSES, "dpo", "ipo")} <= met
    shared = [grid for grid in grids if grid == (1, 1) or grid[1] > 1]
    assert {(*grid, shape_name(shape)) for grid in shared for shape in SHAPES} <= met


def test_cases_pass_every_bound_in_some_tokens_and_not_in_others(results):
    for name, config in CASES.items():
        metrics, _ = results[1, Job(SMALL, name, LAYOUTS[0])]
        shares = [n for n in metrics if n.endswith(("clipped_share", "masked_share"))]
        assert all(0 < metrics[share] < 1 for share in shares), name
        assert (
            f"mismatch/{'masked' if config.correction == 'mis' else 'clipped'}_share" in shares
        ) == (config.correction != "none")
