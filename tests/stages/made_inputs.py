"""Tokens as a loss gets them, with known ratios: float64, without a model."""

import torch

from stages.update.config import UpdateConfig
from stages.update.loss_inputs import LossInputs
from stages.update.losses import find_loss

F64 = torch.float64


def tensor(values):
    return torch.tensor(values, dtype=F64)


def inputs_of(ratios, advantages, sequences=None, mask=None, **columns):
    """Tokens with the given ratios against an old log-prob of -1; the log-probs are a leaf."""
    old = torch.full((len(ratios),), -1.0, dtype=F64)
    sequences = sequences or [0] * len(ratios)
    return LossInputs(
        **{
            "logprobs_N": (old + tensor(ratios).log()).requires_grad_(),
            "entropy_N": torch.zeros_like(old),
            "old_N": old,
            "sampler_N": old,
            "reference_N": None,
            "advantages_N": tensor(advantages),
            "mask_N": torch.ones_like(old) if mask is None else tensor(mask),
            "sequence_N": torch.tensor(sequences),
            "num_sequences": max(sequences) + 1,
            **columns,
        }
    )


def solved(inputs, **config):
    """(loss, its gradient on the log-probs, metrics) a token."""
    config = UpdateConfig(**config)
    result = find_loss(config.loss)(inputs, config)
    (gradient,) = torch.autograd.grad((result.loss_N * inputs.mask_N).sum(), inputs.logprobs_N)
    return result.loss_N.tolist(), gradient.tolist(), result.metrics
