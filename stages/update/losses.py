"""The loss of sampled tokens: pure functions of tensors with one entry a token, (N,)."""

import torch


def clipped_surrogate(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped objective, negated, and where it was clipped; both (N,).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprob - old logprob).
    PPO, arXiv:1707.06347, equation 7; the two bounds are DAPO's, arXiv:2503.14476, equation 10.
    """
    ratio_N = (logprobs_N - old_logprobs_N).exp()
    free_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return -torch.minimum(free_N, clipped_N), clipped_N < free_N


def k3(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """exp(q) - q - 1 with q = reference - policy log-prob: an estimate of KL(policy‖reference).

    Its value is unbiased and never negative. Its gradient is not that of this KL: taken on
    samples of the policy itself, it follows KL(reference‖policy), to first order the same.
    Schulman, "Approximating KL Divergence", 2020; DeepSeekMath, arXiv:2402.03300, equation 4.
    """
    q_N = reference_N - logprobs_N
    return q_N.exp() - q_N - 1
