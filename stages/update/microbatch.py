"""One forward of a micro-batch: its loss, and the sums that the step's metrics are made of.

Shapes: N response tokens of the micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from stages.packed import Packed, pack
from stages.update.config import UpdateConfig
from stages.update.losses import clipped_surrogate, k3
from stages.update.samples import Samples

_SUMS = (
    "loss",
    "policy_loss",
    "kl_loss",
    "tokens",
    "clipped",
    "entropy",
    "ratio",
    "mismatch_k1",
    "mismatch_k3",
    "mismatch_abs",
    "reference_k3",
)
_MAXIMA = ("mismatch_abs_max", "ratio_max")


@dataclass(frozen=True)
class MicroBatch:
    """Packed samples with one entry a response token; float32. ``scale_N`` is the loss weight."""

    packed: Packed
    scale_N: torch.Tensor
    mask_N: torch.Tensor
    advantages_N: torch.Tensor
    sampler_N: torch.Tensor
    old_N: torch.Tensor | None
    reference_N: torch.Tensor | None

    @classmethod
    def of(
        cls,
        samples: Samples,
        members: Sequence[int],
        old: Sequence[np.ndarray] | None,
        device: torch.device,
        scale: Mapping[int, float] | None = None,
    ) -> "MicroBatch":
        """The micro-batch of ``members``. An empty one is a sample of weight 0: every rank has
        to take part in every collective."""
        weight = scale or {}
        is_empty = not members
        members = list(members) or [_shortest(samples)]
        masks = [samples.loss_masks[i] * (not is_empty) for i in members]
        lengths = [len(samples.sequences[i][1]) for i in members]

        def tokens(parts: Sequence[np.ndarray]) -> torch.Tensor:
            joined = np.concatenate(parts).astype(np.float32)
            return torch.from_numpy(joined).to(device)

        def repeated(values: Sequence[float]) -> torch.Tensor:
            return tokens([np.full(n, v) for n, v in zip(lengths, values, strict=True)])

        mask_N = tokens(masks)
        reference = samples.reference_logprobs
        return cls(
            packed=pack([samples.sequences[i] for i in members], device),
            scale_N=repeated([weight.get(i, 0.0) for i in members]) * mask_N,
            mask_N=mask_N,
            advantages_N=tokens([samples.advantages[i] for i in members]),
            sampler_N=tokens([samples.sampler_logprobs[i] for i in members]),
            old_N=None if old is None else tokens([old[i] for i in members]),
            reference_N=None if reference is None else tokens([reference[i] for i in members]),
        )


def _shortest(samples: Samples) -> int:
    lengths = samples.lengths()
    return min((i for i in range(len(samples)) if samples.sequences[i][1]), key=lengths.__getitem__)


@dataclass
class StepSums:
    """Sums and maxima over the tokens of a step on this rank."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    maxima: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_MAXIMA, 0.0))

    def add(self, **values: torch.Tensor) -> None:
        """Add up scalars."""
        for name, value in values.items():
            self.sums[name] += float(value)

    def reach(self, **values: torch.Tensor) -> None:
        """Raise maxima."""
        for name, value in values.items():
            self.maxima[name] = max(self.maxima[name], float(value))

    def reduce(self, device: torch.device) -> dict[str, float]:
        """The step's metrics over all ranks: means over tokens, not means of means."""
        sums = torch.tensor([self.sums[n] for n in _SUMS], dtype=torch.float64, device=device)
        maxima = torch.tensor([self.maxima[n] for n in _MAXIMA], dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        total = dict(zip(_SUMS, sums.tolist(), strict=True))
        tokens = max(total["tokens"], 1.0)
        return {
            "update/loss": total["loss"],
            "update/policy_loss": total["policy_loss"],
            "update/kl_loss": total["kl_loss"],
            "update/trained_tokens": total["tokens"],
            "update/clipped_share": total["clipped"] / tokens,
            "update/entropy": total["entropy"] / tokens,
            "update/ratio_mean": total["ratio"] / tokens,
            "update/reference_kl": total["reference_k3"] / tokens,
            "mismatch/k1": total["mismatch_k1"] / tokens,
            "mismatch/k3": total["mismatch_k3"] / tokens,
            "mismatch/logprob_abs_mean": total["mismatch_abs"] / tokens,
            "mismatch/logprob_abs_max": float(maxima[0]),
            "update/ratio_max": float(maxima[1]),
        }


def microbatch_loss(
    model: torch.nn.Module,
    batch: MicroBatch,
    config: UpdateConfig,
    temperature: float,
    sums: StepSums,
) -> torch.Tensor:
    """The micro-batch's share of the step's loss, a scalar to differentiate."""
    logprobs_N, entropy_N = model(batch.packed, temperature)
    old_N = logprobs_N.detach() if batch.old_N is None else batch.old_N
    policy_N, clipped_N = clipped_surrogate(
        logprobs_N, old_N, batch.advantages_N, config.clip_low, config.clip_high
    )
    policy = (policy_N * batch.scale_N).sum()
    loss = policy
    if batch.reference_N is not None and config.kl_coef > 0:
        k3_N = k3(logprobs_N, batch.reference_N)
        kl = config.kl_coef * (k3_N * batch.scale_N).sum()
        loss = policy + kl
        sums.add(kl_loss=kl.detach(), reference_k3=(k3_N.detach() * batch.mask_N).sum())
    with torch.no_grad():
        # The trainer's view of the policy that sampled; the engine's own tells nothing of itself.
        trainer_N = logprobs_N if config.old_logprobs == "sampler" else old_N
        _count_ratio(sums, batch.mask_N, logprobs_N - old_N, clipped_N, entropy_N)
        _count_mismatch(sums, batch.mask_N, batch.sampler_N - trainer_N)
        sums.add(loss=loss, policy_loss=policy)
    return loss


def _count_ratio(
    sums: StepSums,
    mask_N: torch.Tensor,
    log_ratio_N: torch.Tensor,
    clipped_N: torch.Tensor,
    entropy_N: torch.Tensor,
) -> None:
    ratio_N = log_ratio_N.exp()
    sums.add(
        tokens=mask_N.sum(),
        clipped=(clipped_N * mask_N).sum(),
        entropy=(entropy_N * mask_N).sum(),
        ratio=(ratio_N * mask_N).sum(),
    )
    sums.reach(ratio_max=(ratio_N * mask_N).max())


def _count_mismatch(sums: StepSums, mask_N: torch.Tensor, gap_N: torch.Tensor) -> None:
    """``gap_N``: sampler less trainer log-prob; k1 and k3 estimate KL(sampler‖trainer)."""
    sums.add(
        mismatch_k1=(gap_N * mask_N).sum(),
        mismatch_k3=(((-gap_N).exp() + gap_N - 1) * mask_N).sum(),
        mismatch_abs=(gap_N.abs() * mask_N).sum(),
    )
    sums.reach(mismatch_abs_max=(gap_N.abs() * mask_N).max())
