"""One forward of a micro-batch: its share of the step's loss, and of the step's metrics.

Shapes: N response tokens of the micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stages.packed import Packed, pack
from stages.sequence_parallel import SequenceRanks
from stages.update.config import UpdateConfig
from stages.update.correction import correction_weights
from stages.update.kl import k3, kl_estimate
from stages.update.loss_inputs import Loss, LossInputs, TokenLoss
from stages.update.samples import Samples
from stages.update.step_sums import StepSums


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples with one entry a response token; float32, but for ``sequence_N``. Ranks that
    share the row have all of it but the row: a loss sees whole sequences.

    ``scale_N`` is a token's weight in the step's loss, 0 where the mask is 0. Without ``old_N``
    the policy in training is its own old one; without ``sampler_N`` nothing was sampled.
    """

    packed: Packed
    scale_N: torch.Tensor
    mask_N: torch.Tensor
    advantages_N: torch.Tensor
    sampler_N: torch.Tensor | None
    old_N: torch.Tensor | None
    reference_N: torch.Tensor | None
    sequence_N: torch.Tensor
    num_sequences: int

    @classmethod
    def of(
        cls,
        samples: Samples,
        members: Sequence[int],
        old: Sequence[np.ndarray] | None,
        device: torch.device,
        scale: Mapping[int, float] | None = None,
        ranks: SequenceRanks | None = None,
    ) -> "MicroBatch":
        """The micro-batch of ``members``, whose row ``ranks`` share. An empty one is a pair of
        samples of weight 0: every rank has to take part in every collective."""
        weights, is_empty = scale or {}, not members
        members = list(members) or [shortest_sample(samples)] * 2
        masks = [samples.loss_masks[i] * (not is_empty) for i in members]
        lengths = [len(mask) for mask in masks]

        def tokens(parts: Sequence[np.ndarray]) -> torch.Tensor:
            joined = np.concatenate(parts).astype(np.float32)
            return torch.from_numpy(joined).to(device)

        def of_members(column: Sequence[np.ndarray] | None) -> torch.Tensor | None:
            return None if column is None else tokens([column[i] for i in members])

        return cls(
            packed=pack([samples.sequences[i] for i in members], device, ranks),
            scale_N=tokens([m * weights.get(i, 0.0) for i, m in zip(members, masks, strict=True)]),
            mask_N=tokens(masks),
            advantages_N=tokens([samples.advantages[i] for i in members]),
            sampler_N=of_members(samples.sampler_logprobs),
            old_N=of_members(old),
            reference_N=of_members(samples.reference_logprobs),
            sequence_N=torch.from_numpy(np.repeat(np.arange(len(members)), lengths)).to(device),
            num_sequences=len(members),
        )

    def inputs(self, logprobs_N: torch.Tensor, entropy_N: torch.Tensor) -> LossInputs:
        """What a loss gets, with what the model has computed."""
        now_N, was_chosen_N = logprobs_N.detach(), self.mask_N > 0

        def chosen(values_N: torch.Tensor | None) -> torch.Tensor:
            # What the rollout holds for tokens that nobody sampled must not reach an exp().
            return now_N if values_N is None else torch.where(was_chosen_N, values_N, now_N)

        return LossInputs(
            logprobs_N=logprobs_N,
            entropy_N=entropy_N,
            old_N=chosen(self.old_N),
            sampler_N=chosen(self.sampler_N),
            reference_N=None if self.reference_N is None else chosen(self.reference_N),
            advantages_N=self.advantages_N * self.mask_N,
            mask_N=self.mask_N,
            sequence_N=self.sequence_N,
            num_sequences=self.num_sequences,
        )


def shortest_sample(samples: Samples) -> int:
    """The shortest of those with a response, for a rank that has nothing to do."""
    lengths = samples.lengths()
    return min((i for i in range(len(samples)) if samples.sequences[i][1]), key=lengths.__getitem__)


def microbatch_loss(
    loss: Loss, batch: MicroBatch, inputs: LossInputs, config: UpdateConfig, sums: StepSums
) -> torch.Tensor:
    """The micro-batch's share of the step's loss, a scalar to differentiate:

    the sum of weight x (correction x loss + kl_coef x KL - entropy_coef x entropy).
    """
    sums.count(batch.mask_N, batch.scale_N)
    policy = _checked(loss(inputs, config), inputs, config.loss)
    correction_N, was_bounded_N = correction_weights(inputs, config)
    parts = {"update/policy_loss": (policy.loss_N * correction_N * batch.scale_N).sum()}
    if inputs.reference_N is not None and config.kl_coef > 0:
        kl_N = kl_estimate(inputs, inputs.reference_N, config)
        parts["update/kl_loss"] = config.kl_coef * (kl_N * batch.scale_N).sum()
    if config.entropy_coef > 0:
        bonus = config.entropy_coef * (inputs.entropy_N * batch.scale_N).sum()
        parts["update/entropy_loss"] = -bonus
    total = torch.stack(list(parts.values())).sum()
    with torch.no_grad():
        sums.add_totals({"update/loss": total, **parts})
        sums.add_loss_means({f"update/{name}": v_N for name, v_N in policy.metrics.items()})
        _measure_policy(sums, inputs)
        if batch.sampler_N is not None:
            _measure_mismatch(sums, inputs, config)
        if config.correction != "none":
            _measure_correction(sums, correction_N, was_bounded_N, config)
    return total


def _checked(policy: TokenLoss, inputs: LossInputs, name: str) -> TokenLoss:
    """``policy``, whose values are one a token.

    Raises:
        TypeError, ValueError: a user's loss gave something else.
    """
    if not isinstance(policy, TokenLoss):
        raise TypeError(f"loss {name} gave a {type(policy).__name__}: return a TokenLoss")
    shape = tuple(inputs.logprobs_N.shape)
    for what, values in {"loss_N": policy.loss_N, **policy.metrics}.items():
        if tuple(values.shape) != shape:
            raise ValueError(
                f"loss {name} gave {what} of shape {tuple(values.shape)}, and there are "
                f"{shape[0]} tokens: give one value a token"
            )
    return policy


def _measure_policy(sums: StepSums, inputs: LossInputs) -> None:
    ratio_N = inputs.log_ratios().exp()
    sums.add_token_means({"update/entropy": inputs.entropy_N, "update/ratio_mean": ratio_N})
    sums.add_maxima({"update/ratio_max": ratio_N})
    if inputs.reference_N is not None:
        kl_N = k3(inputs.logprobs_N, inputs.reference_N)
        sums.add_token_means({"update/reference_kl": kl_N})


def _measure_mismatch(sums: StepSums, inputs: LossInputs, config: UpdateConfig) -> None:
    """Sampler against trainer; k1 and k3 estimate KL(sampler‖trainer)."""
    # The trainer's view of the policy that sampled; the engine's own tells nothing of itself.
    trainer_N = inputs.logprobs_N if config.old_logprobs == "sampler" else inputs.old_N
    gap_N = (inputs.sampler_N - trainer_N).double()
    sums.add_token_means(
        {
            "mismatch/k1": gap_N,
            "mismatch/k3": torch.expm1(-gap_N) + gap_N,
            "mismatch/logprob_abs_mean": gap_N.abs(),
        }
    )
    sums.add_effective_size("mismatch/effective_sample_size", (-gap_N).exp())
    sums.add_maxima({"mismatch/logprob_abs_max": gap_N.abs()})


def _measure_correction(
    sums: StepSums, weight_N: torch.Tensor, was_bounded_N: torch.Tensor, config: UpdateConfig
) -> None:
    share = "clipped_share" if config.correction == "tis" else "masked_share"
    sums.add_token_means({"mismatch/weight_mean": weight_N, f"mismatch/{share}": was_bounded_N})
    sums.add_effective_size("mismatch/corrected_sample_size", weight_N.double())
