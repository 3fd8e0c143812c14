"""Estimates of KL(policy‖reference) from the sampled token, (N,): ``update.kl_estimator``.

A sample's estimate of a *value* is not one of its *gradient*: the samples come from the policy
itself, and how they would change with it is not seen by differentiating the estimate. Each
function says what its expected gradient is.

Schulman, "Approximating KL Divergence", 2020, for k1, k2 and k3.
"""

import torch

from stages.update.config import UpdateConfig
from stages.update.loss_inputs import LossInputs


def k1(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """log policy - log reference. Unbiased; its expected gradient is 0: no pull at all."""
    return logprobs_N - reference_N


def k2(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """(log policy - log reference)² / 2. Biased; on samples of the policy itself its expected
    gradient is that of KL(policy‖reference)."""
    return (logprobs_N - reference_N) ** 2 / 2


def k3(logprobs_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """exp(q) - q - 1, q = log reference - log policy. Unbiased and never negative; on samples of
    the policy itself its expected gradient is that of KL(reference‖policy).

    GRPO's: DeepSeekMath, arXiv:2402.03300, equation 4.
    """
    q_N = reference_N - logprobs_N
    return torch.expm1(q_N) - q_N


def k3_weighted(
    logprobs_N: torch.Tensor, reference_N: torch.Tensor, old_N: torch.Tensor
) -> torch.Tensor:
    """(policy / old policy) · k3, the ratio differentiated too. On samples of the *old* policy
    unbiased, and its expected gradient is that of KL(policy‖reference).

    DeepSeek-V3.2, arXiv:2512.02556, equation 7.
    """
    return (logprobs_N - old_N).exp() * k3(logprobs_N, reference_N)


_PLAIN = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(
    inputs: LossInputs, reference_N: torch.Tensor, config: UpdateConfig
) -> torch.Tensor:
    """(N,) the estimate that the configuration asks for."""
    if config.kl_estimator == "k3_weighted":
        return k3_weighted(inputs.logprobs_N, reference_N, inputs.old_N)
    return _PLAIN[config.kl_estimator](inputs.logprobs_N, reference_N)
