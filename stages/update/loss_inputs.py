"""What a loss gets and gives: one entry a response token, and which sequence each belongs to.

Shapes: N response tokens of a micro-batch, B sequences in it. All of a sequence's tokens are in
the same micro-batch, so sums over sequences are whole.

A loss says what each token costs. How much a token weighs in the optimizer step is not its
business (``stages/update/aggregation.py``), nor is the penalty for leaving the reference
(``kl.py``) or the correction for who sampled (``correction.py``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from stages.update.config import UpdateConfig


@dataclass(frozen=True)
class LossInputs:
    """Tokens of a micro-batch; float32 unless said otherwise, log-probs are natural.

    Where the mask is 0 the policy did not choose the token: its log-probs are all alike, its
    advantage is 0, and what a loss gives for it counts nothing.

    Attributes:
        logprobs_N: under the policy in training. This and the entropy have a gradient.
        entropy_N: of the policy's distribution at the token, nats.
        old_N: under the policy that ratios are taken against.
        sampler_N: in the distribution that was sampled from, as the engine computed it; those of
            the policy in training where responses were given.
        reference_N: under the reference model; None where nothing asked for one.
        advantages_N: of the token; equal over a sequence unless an estimator says otherwise.
        mask_N: 1 where the policy chose the token, else 0.
        sequence_N: int64, which sequence the token is of, from 0.
        num_sequences: B. Sequences of a preference pair are neighbours, the chosen one first.
    """

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor
    old_N: torch.Tensor
    sampler_N: torch.Tensor
    reference_N: torch.Tensor | None
    advantages_N: torch.Tensor
    mask_N: torch.Tensor
    sequence_N: torch.Tensor
    num_sequences: int

    def log_ratios(self) -> torch.Tensor:
        """(N,) log(policy / old policy), with the policy's gradient."""
        return self.logprobs_N - self.old_N

    def sequence_sums(self, values_N: torch.Tensor) -> torch.Tensor:
        """(B,) sums over each sequence's chosen tokens, float64.

        The one place where tokens of a sequence meet: where a sequence is spread over ranks, this
        is what has to be reduced over them.
        """
        sums_B = values_N.new_zeros(self.num_sequences, dtype=torch.float64)
        return sums_B.index_add(0, self.sequence_N, (values_N * self.mask_N).double())

    def sequence_means(self, values_N: torch.Tensor) -> torch.Tensor:
        """(B,) means over each sequence's chosen tokens, float64; 0 where there are none."""
        return self.sequence_sums(values_N) / self.sequence_sums(self.mask_N).clamp(min=1)

    def spread(self, values_B: torch.Tensor) -> torch.Tensor:
        """(N,) float32: each token gets its sequence's value."""
        return values_B.index_select(0, self.sequence_N).to(self.logprobs_N.dtype)


@dataclass(frozen=True)
class TokenLoss:
    """What a loss gives.

    Attributes:
        loss_N: cost of each token, to be minimised. A loss of whole sequences gives each token its
            sequence's: weights are equal over a sequence, so the sum is right.
        metrics: name to (N,), logged as ``update/<name>``: the mean, weighed as the loss is.
    """

    loss_N: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


Loss = Callable[[LossInputs, UpdateConfig], TokenLoss]
