"""Packed log-probs against a plain forward of one sequence at a time, in value and gradient."""

import pytest
import torch

import tiny
from stages import logprobs as under_test
from stages.logprobs import LogprobModel
from stages.packed import ATTENTION, pack

CPU = torch.device("cpu")
TEMPERATURE = 0.7
SEQUENCES = [
    ([1, 5, 6, 7], [8, 9, 2]),
    ([1, 5, 6, 7], [8, 9, 2]),
    ([1], [4]),
    ([1, 9, 9], [10, 11, 12, 13, 14]),
    ([1, 20, 21, 22, 23, 24], [2]),
]


def oracle(model, sequences):
    """One sequence at a time, no packing, log-softmax of whole logits."""
    parts = []
    for prompt, response in sequences:
        logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0]
        table = (logits / TEMPERATURE).log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(response) - 1)
        parts += [table[place, token] for place, token in zip(places, response, strict=True)]
    return torch.stack(parts)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [3, 1024])
def test_packed_logprobs_equal_those_of_single_sequences(kind, tied, chunk, monkeypatch):
    monkeypatch.setattr(under_test, "CHUNK", chunk)
    plain = tiny.model(kind, tied).double()
    packed = tiny.model(kind, tied).double()
    packed.set_attn_implementation(ATTENTION)
    expected = oracle(plain, SEQUENCES)
    got, entropy = LogprobModel(packed)(pack(SEQUENCES, CPU), TEMPERATURE)
    # The normaliser is float32 on purpose; everything before it is float64 here.
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=0)
    assert (entropy > 0).all()
    weights = torch.linspace(-1, 1, len(expected), dtype=torch.float64)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    for (name, a), b in zip(plain.named_parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_packed_logprobs_do_not_change_with_neighbours():
    model = tiny.model().double()
    model.set_attn_implementation(ATTENTION)
    wrapped = LogprobModel(model)
    alone = [wrapped(pack([s], CPU), TEMPERATURE)[0] for s in SEQUENCES]
    together, _ = wrapped(pack(SEQUENCES, CPU), TEMPERATURE)
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=0)
    assert len(together) == sum(len(response) for _, response in SEQUENCES)


def test_entropy_of_a_flat_head_is_the_log_of_the_vocabulary():
    model = tiny.model(tied=False)
    model.set_attn_implementation(ATTENTION)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    _, entropy = LogprobModel(model)(pack(SEQUENCES, CPU), 1.0)
    torch.testing.assert_close(entropy, torch.full_like(entropy, torch.tensor(48.0).log()))
