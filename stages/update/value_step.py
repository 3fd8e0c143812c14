"""A critic's part of an optimizer step, short of applying it: its loss, gradients and metrics.

Shapes: N response tokens of a micro-batch.

The loss of a step is the mean over all of its chosen tokens, over all micro-batches and ranks,
whatever ``update.loss_aggregation`` says of the policy's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stages.packed import Packed, pack, segments_of
from stages.sequence_parallel import SequenceRanks
from stages.update.losses import value_loss
from stages.update.microbatch import shortest_sample
from stages.update.samples import Samples
from stages.update.step_sums import StepSums

# Below it, relative to its square's mean, a return's variance is rounding.
_NO_VARIANCE = 1e-12


@dataclass(frozen=True)
class ValueBatch:
    """Packed samples with one entry a response token, float32.

    ``weight_N`` is a token's weight in the step's loss, and ``mask_N`` 1 where that is not 0.
    """

    packed: Packed
    weight_N: torch.Tensor
    mask_N: torch.Tensor
    old_N: torch.Tensor
    returns_N: torch.Tensor

    @classmethod
    def of(
        cls,
        samples: Samples,
        members: Sequence[int],
        weight: float,
        device: torch.device,
        ranks: SequenceRanks | None = None,
    ) -> "ValueBatch":
        """The micro-batch of ``members``, whose chosen tokens have ``weight`` each, and whose row
        ``ranks`` share. An empty one is a sample of weight 0: every rank has to take part in every
        collective."""
        taken = list(members) or [shortest_sample(samples)]
        assert samples.values is not None
        assert samples.returns is not None

        def tokens(column: Sequence[np.ndarray]) -> torch.Tensor:
            joined = np.concatenate([column[i] for i in taken]).astype(np.float32)
            return torch.from_numpy(joined).to(device)

        mask_N = tokens(samples.loss_masks) * bool(members)
        return cls(
            packed=pack([samples.sequences[i] for i in taken], device, ranks),
            weight_N=mask_N * weight,
            mask_N=mask_N,
            old_N=tokens(samples.values),
            returns_N=tokens(samples.returns),
        )


def accumulate_value_gradients(
    model: Any,
    samples: Samples,
    microbatches: Sequence[Sequence[int]],
    num_tokens: int,
    value_clip: float | None,
    ranks: SequenceRanks | None = None,
) -> StepSums:
    """Add the step's gradients to ``model``'s, and return its sums. Collective.

    Args:
        model: sharded, of :class:`stages.update.value_model.ValueModel`.
        microbatches: this rank's; every rank has as many, and those of ``ranks`` the same.
        num_tokens: chosen tokens of the whole step.
        ranks: those that share each micro-batch with this one.
    """
    device = next(model.parameters()).device
    sums = StepSums(device)
    for n, members in enumerate(microbatches):
        model.set_requires_gradient_sync(n == len(microbatches) - 1)
        batch = ValueBatch.of(samples, members, 1 / num_tokens, device, ranks)
        values_N = model(batch.packed)
        loss_N, was_clipped_N = value_loss(
            values_N, batch.old_N, batch.returns_N, math.inf if value_clip is None else value_clip
        )
        # Checkpointed layers run once more in backward, and attention has to know the segments.
        with segments_of(batch.packed):
            (loss_N * batch.weight_N).sum().backward()
        _measure(sums, batch, values_N.detach(), loss_N.detach(), was_clipped_N)
    return sums


def _measure(
    sums: StepSums,
    batch: ValueBatch,
    values_N: torch.Tensor,
    loss_N: torch.Tensor,
    was_clipped_N: torch.Tensor,
) -> None:
    sums.count(batch.mask_N, batch.weight_N)
    returns_N = batch.returns_N.double()
    error_N = returns_N - values_N
    sums.add_token_means(
        {
            "critic/value_loss": loss_N,
            "critic/value_mean": values_N,
            "critic/return_mean": returns_N,
            "critic/clipped_share": was_clipped_N,
            "error": error_N,
            "error²": error_N**2,
            "return²": returns_N**2,
        }
    )


def value_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """The step's metrics, of its reduced sums.

    Explained variance is 1 - Var(return - value) / Var(return), of the values before the step: 1
    for a critic that knows all, 0 for one that knows the mean, and not there where all returns
    are one.
    """
    metrics = {name: value for name, value in sums.items() if name.startswith("critic/")}
    metrics["critic/trained_tokens"] = sums["update/trained_tokens"]
    left = sums["error²"] - sums["error"] ** 2
    variance = sums["return²"] - sums["critic/return_mean"] ** 2
    if variance > _NO_VARIANCE * sums["return²"]:
        metrics["critic/explained_variance"] = 1 - left / variance
    return metrics
