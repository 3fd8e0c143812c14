"""Packed log-probs against a plain forward of one sequence at a time, in value and gradient."""

import pytest
import torch
import transformers

import tiny
from stages import logprobs as under_test
from stages.logprobs import LogprobModel, TokenLogprobs
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


def test_entropy_has_the_gradient_of_the_plain_sum(monkeypatch):
    monkeypatch.setattr(under_test, "CHUNK", 3)
    plain, packed = tiny.model(tied=False).double(), tiny.model(tied=False).double()
    packed.set_attn_implementation(ATTENTION)
    weights = torch.linspace(-1, 1, 13, dtype=torch.float64)
    entropies = []
    for prompt, response in SEQUENCES:
        logits = plain(input_ids=torch.tensor([[*prompt, *response]])).logits[0] / TEMPERATURE
        table = logits[len(prompt) - 1 : -1].log_softmax(-1)
        entropies.append(-(table.exp() * table).sum(-1))
    expected = torch.cat(entropies)
    logprobs, entropy = LogprobModel(packed)(pack(SEQUENCES, CPU), TEMPERATURE)
    torch.testing.assert_close(entropy.double(), expected, atol=2e-6, rtol=0)
    ((expected + oracle(plain, SEQUENCES)) * weights).sum().backward()
    ((entropy + logprobs) * weights).sum().backward()
    for (name, a), b in zip(plain.named_parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, atol=1e-5, rtol=1e-4, msg=name)
    # The entropy alone as well: what there is no gradient for is left out.
    packed.zero_grad(), plain.zero_grad()
    (LogprobModel(packed)(pack(SEQUENCES[:1], CPU), TEMPERATURE)[1]).sum().backward()
    prompt, response = SEQUENCES[0]
    logits = plain(input_ids=torch.tensor([[*prompt, *response]])).logits[0] / TEMPERATURE
    table = logits[len(prompt) - 1 : -1].log_softmax(-1)
    (-(table.exp() * table)).sum().backward()
    for (name, a), b in zip(plain.named_parameters(), packed.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_logprobs_of_a_bfloat16_head_are_not_rounded_before_the_softmax():
    # Logits 20.06, 20, 5, 1 as sums of bfloat16 numbers; in bfloat16 the first two are one.
    parts = [0.06, 0.06 - torch.tensor(0.06).bfloat16().item()]
    hidden = torch.tensor([[1.0, 1, 1], [1, 1, 1]]).bfloat16()
    weight = torch.tensor([[20, *parts], [20, 0, 0], [5, 0, 0], [1, 0, 0]]).bfloat16()
    hidden.requires_grad_(), weight.requires_grad_()
    logprobs, _ = TokenLogprobs.apply(hidden, weight, torch.tensor([0, 1]), 1.0)
    assert logprobs.dtype == torch.float32
    assert logprobs.tolist() == pytest.approx([-0.663598, -0.723597], abs=2e-6)
    logprobs[0].backward()
    # onehot - p: p of the first two is 0.514995 and 0.485004.
    assert weight.grad[:2, 0].tolist() == pytest.approx([0.485, -0.485], abs=2e-3)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_logprobs_on_unchanged_weights_are_the_same_for_any_micro_batch(size):
    model = tiny.model()
    model.set_attn_implementation(ATTENTION)
    wrapped = LogprobModel(model)
    whole, _ = wrapped(pack(SEQUENCES, CPU), TEMPERATURE)
    parts = [SEQUENCES[k : k + size] for k in range(0, len(SEQUENCES), size)]
    split = torch.cat([wrapped(pack(part, CPU), TEMPERATURE)[0] for part in parts])
    torch.testing.assert_close(split, whole, atol=1e-5, rtol=0)
    assert whole.dtype == torch.float32


def test_packed_logprobs_of_learned_positions_count_from_each_sequences_start():
    config = transformers.GPT2Config(
        vocab_size=48, n_positions=32, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0
    )
    torch.manual_seed(1)
    plain = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        plain.transformer.wpe.weight.normal_(0, 1.0)
    expected = oracle(plain, SEQUENCES)
    plain.set_attn_implementation(ATTENTION)
    got, _ = LogprobModel(plain)(pack(SEQUENCES, CPU), TEMPERATURE)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
