"""Learning from pairs: which samples make one, and the losses that compare them.

Shapes: N response tokens, B = 2P sequences, P pairs; see ``stages/update/loss_inputs.py``.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from stages.update.config import UpdateConfig
from stages.update.loss_inputs import LossInputs, TokenLoss


def preference_pairs(
    ids: Sequence[str], groups: Sequence[str], rewards_S: np.ndarray, candidates: Iterable[int]
) -> list[tuple[int, int]]:
    """(chosen, rejected) of each group among ``candidates``: its best and worst by reward.

    Of equals the one whose id comes first is taken; a group whose rewards are all equal makes no
    pair. ``rewards_S`` has to be known for all candidates.
    """
    members: dict[str, list[int]] = {}
    for i in sorted(candidates, key=ids.__getitem__):
        members.setdefault(groups[i], []).append(i)
    pairs = []
    for indices in members.values():
        chosen = max(indices, key=lambda i: rewards_S[i])
        rejected = min(indices, key=lambda i: rewards_S[i])
        if rewards_S[chosen] > rewards_S[rejected]:
            pairs.append((chosen, rejected))
    return pairs


def dpo(inputs: LossInputs, config: UpdateConfig) -> TokenLoss:
    """-(1 - ε) log sigmoid(β h) - ε log sigmoid(-β h), β = ``dpo_beta``.

    h is how much further the policy has moved from the reference towards the chosen response than
    towards the rejected one, in log-probs of whole responses. arXiv:2305.18290, equation 7; ε =
    ``dpo_label_smoothing`` is the chance that a label is wrong: conservative DPO, Mitchell, 2023.
    """
    margin_P = config.dpo_beta * _margins(inputs)
    smoothing = config.dpo_label_smoothing
    loss_P = -(1 - smoothing) * logsigmoid(margin_P) - smoothing * logsigmoid(-margin_P)
    return _of_pairs(inputs, loss_P, margin_P)


def ipo(inputs: LossInputs, config: UpdateConfig) -> TokenLoss:
    """(h - 1 / (2 β))²: as DPO, with a margin to reach and not to pass. arXiv:2310.12036,
    equation 17, where ``dpo_beta`` is called τ."""
    margin_P = _margins(inputs)
    return _of_pairs(inputs, (margin_P - 1 / (2 * config.dpo_beta)) ** 2, margin_P)


def _margins(inputs: LossInputs) -> torch.Tensor:
    if inputs.reference_N is None:
        raise ValueError("a loss of preference pairs needs the reference model's log-probs")
    moved_B = inputs.sequence_sums(inputs.logprobs_N - inputs.reference_N)
    return moved_B[0::2] - moved_B[1::2]


def _of_pairs(inputs: LossInputs, loss_P: torch.Tensor, margin_P: torch.Tensor) -> TokenLoss:
    """Each token gets its pair's loss."""

    def spread(values_P: torch.Tensor) -> torch.Tensor:
        return inputs.spread(values_P.repeat_interleave(2))

    metrics = {"preference_margin": margin_P.detach(), "preference_accuracy": margin_P > 0}
    return TokenLoss(spread(loss_P), {name: spread(v) for name, v in metrics.items()})
