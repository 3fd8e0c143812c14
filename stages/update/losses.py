"""Policy losses, one function each: ``update.loss``. Pure functions of tensors, (N,) in and out.

Shapes: N response tokens of a micro-batch, B sequences in it. A is the advantage, r the ratio
exp(log-prob - old log-prob). Each loss is the negative of its paper's objective.

Ratios of whole sequences are written so that no gradient passes through a sum over a sequence:
each token carries the sequence's value, and its own share of the gradient.
"""

import math

import torch

from stages.update.config import UpdateConfig
from stages.update.loss_inputs import Loss, LossInputs, TokenLoss
from stages.update.preferences import dpo, ipo
from stages.user_code import load_function


def clip(inputs: LossInputs, config: UpdateConfig) -> TokenLoss:
    """PPO: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    arXiv:1707.06347, equation 7; the two bounds are DAPO's, arXiv:2503.14476, equation 8. With
    ``clip_dual`` c, no less than c A where A < 0: arXiv:1912.09729, equation 5.
    """
    return _clipped(inputs.log_ratios().exp(), inputs.advantages_N, config)


def gspo(inputs: LossInputs, config: UpdateConfig) -> TokenLoss:
    """PPO's clipping with the sequence's ratio s = (product of its r)^(1 / length).

    In the form with one ratio a token, s · r / stop(r), and so with advantages that may differ
    over a sequence; where they don't, value and gradient are those of the form with one ratio a
    sequence. GSPO, arXiv:2507.18071, equations 5 and 7, and 13 and 14 for the token's form. The
    clip bounds of the paper are some 1e-4: s is close to 1.
    """
    log_ratio_N = inputs.log_ratios()
    log_s_N = _with_value(inputs.sequence_means(log_ratio_N.detach()), log_ratio_N, inputs)
    return _clipped(log_s_N.exp(), inputs.advantages_N, config)


def cispo(inputs: LossInputs, config: UpdateConfig) -> TokenLoss:
    """REINFORCE with a clipped weight: -stop(clip(r, 1 - clip_low, 1 + clip_high)) A log-prob.

    No token loses its gradient. MiniMax-M1, arXiv:2506.13585, equations 4 and 5; the paper sets no
    lower bound, which is ``clip_low: 1``.
    """
    ratio_N = inputs.log_ratios().detach().exp()
    weight_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    return TokenLoss(loss_N, {"clipped_share": weight_N != ratio_N})


def gmpo(inputs: LossInputs, config: UpdateConfig) -> TokenLoss:
    """-A (product over the sequence of the clipped r)^(1 / length).

    Clipping is PPO's, token by token, where it lowers the objective. GMPO, arXiv:2507.20673,
    equation 4; the paper's bounds of the ratio are exp(-0.4) and exp(0.4).
    """
    log_ratio_N, advantages_N = inputs.log_ratios(), inputs.advantages_N
    floor = math.log1p(-config.clip_low) if config.clip_low < 1 else -math.inf
    bounded_N = log_ratio_N.clamp(floor, math.log1p(config.clip_high))
    log_r_N = torch.where(
        advantages_N > 0,
        torch.minimum(log_ratio_N, bounded_N),
        torch.maximum(log_ratio_N, bounded_N),
    )
    log_mean_N = _with_value(inputs.sequence_means(log_r_N.detach()), log_r_N, inputs)
    return TokenLoss(-advantages_N * log_mean_N.exp(), {"clipped_share": log_r_N != log_ratio_N})


def sapo(inputs: LossInputs, config: UpdateConfig) -> TokenLoss:
    """-(4 / τ) sigmoid(τ (r - 1)) A, with ``sapo_tau_pos`` as τ where A > 0, else
    ``sapo_tau_neg``.

    A soft clip: the gradient is PPO's times 4 p (1 - p), p the sigmoid, which is 1 at r = 1.
    SAPO, arXiv:2511.20347, equations 5 to 7.
    """
    advantages_N = inputs.advantages_N
    tau_N = torch.where(advantages_N > 0, config.sapo_tau_pos, config.sapo_tau_neg)
    p_N = torch.sigmoid(tau_N * (inputs.log_ratios().exp() - 1))
    return TokenLoss(-4 / tau_N * p_N * advantages_N, {"gate": 4 * p_N * (1 - p_N)})


def reinforce(inputs: LossInputs, config: UpdateConfig) -> TokenLoss:
    """-A log-prob, with no ratio: right for the policy that sampled, and for a later one only with
    ``update.correction`` and one optimizer step an iteration. Williams, 1992."""
    return TokenLoss(-inputs.advantages_N * inputs.logprobs_N)


LOSSES: dict[str, Loss] = {
    "clip": clip,
    "gspo": gspo,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "reinforce": reinforce,
    "dpo": dpo,
    "ipo": ipo,
}


def find_loss(name: str) -> Loss:
    """The loss of that name, or the user's own by import path.

    Raises:
        ValueError: there is none.
    """
    return LOSSES.get(name) or load_function(name, "loss")


def value_loss(
    values_N: torch.Tensor, old_values_N: torch.Tensor, returns_N: torch.Tensor, clip_value: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A critic's squared error, halved, and where clipping raised it; both (N,).

    max((v - R)², (clip(v, old - clip_value, old + clip_value) - R)²) / 2: a critic gains nothing
    by moving further than that from its old values. As in PPO's published code (OpenAI baselines,
    ppo2); arXiv:2005.12729, section 3.
    """
    free_N = (values_N - returns_N) ** 2
    bounded_N = torch.clamp(values_N, old_values_N - clip_value, old_values_N + clip_value)
    clipped_N = (bounded_N - returns_N) ** 2
    return torch.maximum(free_N, clipped_N) / 2, clipped_N > free_N


def _clipped(ratio_N: torch.Tensor, advantages_N: torch.Tensor, config: UpdateConfig) -> TokenLoss:
    free_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_N
    objective_N, was_clipped_N = torch.minimum(free_N, bounded_N), bounded_N < free_N
    if config.clip_dual is not None:
        floor_N = torch.where(advantages_N < 0, config.clip_dual * advantages_N, -torch.inf)
        was_clipped_N = was_clipped_N | (objective_N < floor_N)
        objective_N = torch.maximum(objective_N, floor_N)
    return TokenLoss(-objective_N, {"clipped_share": was_clipped_N})


def _with_value(
    values_B: torch.Tensor, gradient_N: torch.Tensor, inputs: LossInputs
) -> torch.Tensor:
    """(N,): the sequence's value, with the gradient of ``gradient_N``."""
    return inputs.spread(values_B) + gradient_N - gradient_N.detach()
