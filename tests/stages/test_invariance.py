"""Same samples, same step: whatever the micro-batches, the packing, the order, the ranks, the
chunks of the log-probs and the checkpointing of activations, a step has one loss, one gradient and
one set of metrics, for every loss with every aggregation and every correction.

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
from invariance_cases import CASES, LAYOUTS, TEMPERATURE, VOCABULARY, samples, with_logprobs

pytestmark = pytest.mark.real

CHILD = "import sys; from invariance_ranks import main; main(*map(int, sys.argv[1:3]), sys.argv[3])"
NAMES = list(CASES)


def forward(model, sequence):
    """(log-probs, entropies) of the response's tokens, by one plain forward of one sequence."""
    prompt, response = sequence
    logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0] / TEMPERATURE
    table = logits[len(prompt) - 1 : len(prompt) + len(response) - 1].log_softmax(-1)
    chosen = table[torch.arange(len(response)), torch.tensor(response, dtype=torch.long)]
    return chosen, -(table.exp() * table).sum(-1)


class Oracle:
    """Every case's loss and gradient from one float64 forward of each sequence."""

    def __init__(self, folder):
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.2)
        self.folder = folder
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


def results_of(ranks, folder):
    """All cases on ``ranks`` processes in one group: {(case, layout): (metrics, gradient)}."""
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parent, here.parent.parent)))
    children = [start_child(CHILD, rank, ranks, folder, PYTHONPATH=path) for rank in range(ranks)]
    for child in children:
        _, errors = child.communicate(timeout=300)
        assert child.returncode == 0, errors
    files = [Path(folder) / f"results-{ranks}-{rank}.pickle" for rank in range(ranks)]
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
def oracle(tmp_path_factory):
    return Oracle(str(tmp_path_factory.mktemp("invariance")))


@pytest.fixture(scope="module")
def solved(oracle):
    return {name: oracle.solve(config) for name, config in CASES.items()}


@pytest.fixture(scope="module")
def one_rank(oracle):
    return results_of(1, oracle.folder)


RANKS = [1, 2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=RANKS, ids=lambda n: f"{n}-ranks")
def results(request, oracle, one_rank):
    return one_rank if request.param == 1 else results_of(request.param, oracle.folder)


def distance(a, b):
    """Relative to the length of ``b``."""
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("name", NAMES)
def test_step_in_any_layout_has_the_loss_and_gradient_of_plain_loops(results, solved, name):
    loss, gradient = solved[name]
    assert np.linalg.norm(gradient) > 1e-3
    layouts = [layout for case, layout in results if case == name]
    assert layouts
    for layout in layouts:
        metrics, got = results[name, layout]
        assert metrics["update/loss"] == pytest.approx(loss, rel=1e-5), LAYOUTS[layout]
        assert distance(got, gradient) < 1e-5, LAYOUTS[layout]


@pytest.mark.parametrize("name", NAMES)
def test_step_in_any_layout_has_the_metrics_of_one_plain_micro_batch(results, one_rank, name):
    expected, _ = one_rank[name, 0]
    for (case, layout), (metrics, _) in results.items():
        if case == name:
            assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-7), LAYOUTS[layout]


def test_cases_pass_every_bound_in_some_tokens_and_not_in_others(one_rank):
    for name, config in CASES.items():
        metrics, _ = one_rank[name, 0]
        shares = [n for n in metrics if n.endswith(("clipped_share", "masked_share"))]
        assert all(0 < metrics[share] < 1 for share in shares), name
        assert (
            f"mismatch/{'masked' if config.correction == 'mis' else 'clipped'}_share" in shares
        ) == (config.correction != "none")
