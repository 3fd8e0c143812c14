"""The losses of the papers as plain loops over sequences and tokens: slow, and easy to check.

A sequence is a :class:`Sequence` of its chosen tokens alone, in float64. Ratios of sequences are
products and roots as the papers write them, with autograd through all of it.
"""

import math
from dataclasses import dataclass

import torch


@dataclass
class Sequence:
    """(n,) tensors of a sequence's chosen tokens; ``advantage`` is one number."""

    now: torch.Tensor
    entropy: torch.Tensor
    old: torch.Tensor
    sampler: torch.Tensor
    reference: torch.Tensor
    advantage: float

    def __len__(self):
        return len(self.now)


def step_loss(sequences, config, max_new_tokens):
    """The loss of a step on ``sequences``: all those that have a reward."""
    total = torch.zeros((), dtype=torch.float64)
    tokens = sum(len(s) for s in sequences)
    for s in sequences:
        costs = COSTS[config.loss](s, config)
        weights = correction(s, config)
        for t in range(len(s)):
            cost = weights[t] * costs[t]
            if config.kl_coef > 0:
                cost = cost + config.kl_coef * kl(s, t, config.kl_estimator)
            cost = cost - config.entropy_coef * s.entropy[t]
            total = total + cost / divisor(config, s, sequences, tokens, max_new_tokens)
    return total


def divisor(config, s, sequences, tokens, max_new_tokens):
    return {
        "token_mean": tokens,
        "sequence_mean": len(sequences) * len(s),
        "sequence_sum": len(sequences),
        "fixed_length": len(sequences) * max_new_tokens,
    }[config.loss_aggregation]


def clipped(ratio, advantage, config):
    """PPO's objective of one ratio, with the dual clip."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    bounded = min(max(ratio, torch.tensor(low)), torch.tensor(high))
    objective = min(ratio * advantage, bounded * advantage)
    if config.clip_dual is not None and advantage < 0:
        objective = max(objective, torch.tensor(config.clip_dual * advantage))
    return objective


def clip(s, config):
    return [-clipped((s.now[t] - s.old[t]).exp(), s.advantage, config) for t in range(len(s))]


def shared(ratio, ratios, config):
    """A sequence's ratio for each of its tokens.

    Where a correction weighs tokens one by one, the papers' form of a ratio a token: the value is
    the sequence's, the gradient the token's own.
    """
    if config.correction == "none" or config.correction_level == "sequence":
        return [ratio] * len(ratios)
    return [ratio.detach() * r / r.detach() for r in ratios]


def gspo(s, config):
    ratios = [(s.now[t] - s.old[t]).exp() for t in range(len(s))]
    ratio = product(ratios) ** (1 / len(s))
    return [-clipped(r, s.advantage, config) for r in shared(ratio, ratios, config)]


def gmpo(s, config):
    low, high = 1 - config.clip_low, 1 + config.clip_high
    kept = []
    for t in range(len(s)):
        ratio = (s.now[t] - s.old[t]).exp()
        bounded = min(max(ratio, torch.tensor(low)), torch.tensor(high))
        # The smaller of the two objectives, by its size: the advantage is taken out.
        kept.append(min(ratio, bounded) if s.advantage > 0 else max(ratio, bounded))
    ratio = product(kept) ** (1 / len(s))
    return [-s.advantage * r for r in shared(ratio, kept, config)]


def cispo(s, config):
    costs = []
    for t in range(len(s)):
        ratio = math.exp((s.now[t] - s.old[t]).item())
        weight = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        costs.append(-weight * s.advantage * s.now[t])
    return costs


def sapo(s, config):
    tau = config.sapo_tau_pos if s.advantage > 0 else config.sapo_tau_neg
    costs = []
    for t in range(len(s)):
        ratio = (s.now[t] - s.old[t]).exp()
        costs.append(-(4 / tau) / (1 + (-tau * (ratio - 1)).exp()) * s.advantage)
    return costs


def reinforce(s, config):
    return [-s.advantage * s.now[t] for t in range(len(s))]


COSTS = {
    "clip": clip,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}


def product(factors):
    result = torch.ones((), dtype=torch.float64)
    for factor in factors:
        result = result * factor
    return result


def correction(s, config):
    """Weights old / sampler, plain numbers."""
    ratios = [math.exp((s.old[t] - s.sampler[t]).item()) for t in range(len(s))]
    if config.correction == "none":
        return [1.0] * len(s)
    if config.correction_level == "sequence":
        ratios = [math.prod(ratios)] * len(s)
    if config.correction == "tis":
        return [min(ratio, config.correction_cap) for ratio in ratios]
    is_kept = [config.correction_floor <= r <= config.correction_cap for r in ratios]
    return [ratio if kept else 0.0 for ratio, kept in zip(ratios, is_kept, strict=True)]


def kl(s, t, estimator):
    ratio = (s.now[t] - s.reference[t]).exp()  # policy / reference
    k3 = 1 / ratio - 1 + ratio.log()
    return {
        "k1": ratio.log(),
        "k2": ratio.log() ** 2 / 2,
        "k3": k3,
        "k3_weighted": (s.now[t] - s.old[t]).exp() * k3,
    }[estimator]


def preference_loss(pairs, config):
    """Mean over (chosen, rejected) pairs of sequences."""
    total = torch.zeros((), dtype=torch.float64)
    for chosen, rejected in pairs:
        h = sum(chosen.now - chosen.reference) - sum(rejected.now - rejected.reference)
        if config.loss == "ipo":
            cost = (h - 1 / (2 * config.dpo_beta)) ** 2
        else:
            p = 1 / (1 + (-config.dpo_beta * h).exp())
            smoothing = config.dpo_label_smoothing
            cost = -(1 - smoothing) * p.log() - smoothing * (1 - p).log()
        total = total + cost / len(pairs)
    return total
