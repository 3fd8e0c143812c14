"""The engine samples from a slightly other policy than the trainer computes: ``update.correction``.

The same weights in another program give other log-probs. A token's policy loss is weighed by how
much likelier the trainer's old policy makes the sample than the engine did, w = old / sampler:
without it the update follows a policy that nobody sampled from. This weight has no gradient, and
is apart from the ratio that a loss clips, which is policy / old.
"""

import torch

from stages.update.config import UpdateConfig
from stages.update.loss_inputs import LossInputs


def correction_weights(
    inputs: LossInputs, config: UpdateConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the policy loss, and which of them a bound has changed; both (N,).

    ``tis`` takes no more than ``correction_cap``: truncated importance sampling (Ionides, 2008;
    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025).
    ``mis`` gives 0 to what lies above it or below ``correction_floor``: masked (Liu et al., "When
    Speed Kills Stability", 2025; with both bounds IcePop, arXiv:2510.18855). At level ``sequence``
    w is that of the whole response, the product over its tokens, for each of them. A masked token
    still counts in what the loss is divided by.
    """
    log_weight_N = (inputs.old_N - inputs.sampler_N).detach()
    if config.correction == "none":
        return torch.ones_like(log_weight_N), torch.zeros_like(log_weight_N, dtype=torch.bool)
    if config.correction_level == "sequence":
        log_weight_N = inputs.spread(inputs.sequence_sums(log_weight_N))
    weight_N = log_weight_N.exp()
    if config.correction == "tis":
        return weight_N.clamp(max=config.correction_cap), weight_N > config.correction_cap
    was_masked_N = (weight_N > config.correction_cap) | (weight_N < config.correction_floor)
    return torch.where(was_masked_N, 0.0, weight_N), was_masked_N
