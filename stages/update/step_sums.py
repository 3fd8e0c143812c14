"""What an optimizer step's metrics are made of: sums over tokens, over all micro-batches and ranks.

Shapes: N response tokens of a micro-batch.

Sums are float64 on the device and are read once, at the step's end: reading one waits for all
that was asked of a GPU before.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist


class StepSums:
    """One rank's sums and maxima of a step, by metric.

    A metric's mean is its sum over all of the step, divided once: never a mean of means. All ranks
    have to add to the same metrics.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tokens, self._weight = self._zero(), self._zero()
        self._totals: dict[str, torch.Tensor] = {}
        self._over_tokens: dict[str, torch.Tensor] = {}
        self._as_loss: dict[str, torch.Tensor] = {}
        self._sizes: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}

    def count(self, mask_N: torch.Tensor, scale_N: torch.Tensor) -> None:
        """Take in a micro-batch: its chosen tokens, and what they weigh in the loss."""
        self._mask_N, self._scale_N = mask_N.double(), scale_N.double()
        self._tokens += self._mask_N.sum()
        self._weight += self._scale_N.sum()

    def add_totals(self, values: Mapping[str, torch.Tensor]) -> None:
        """Scalars to be summed."""
        for name, value in values.items():
            _add(self._totals, name, value.double())

    def add_token_means(self, values: Mapping[str, torch.Tensor]) -> None:
        """(N,) values to be averaged over chosen tokens."""
        for name, value_N in values.items():
            _add(self._over_tokens, name, (value_N.double() * self._mask_N).sum())

    def add_loss_means(self, values: Mapping[str, torch.Tensor]) -> None:
        """(N,) values to be averaged as the loss weighs tokens."""
        for name, value_N in values.items():
            _add(self._as_loss, name, (value_N.double() * self._scale_N).sum())

    def add_effective_size(self, name: str, weight_N: torch.Tensor) -> None:
        """(N,) float64 importance weights, of which the effective sample size is kept as a share
        of the chosen tokens: (sum w)² / (N sum w²), 1 where all are equal. Kish, 1965."""
        weight_N = weight_N * self._mask_N
        _add(self._sizes, name, torch.stack([weight_N.sum(), (weight_N**2).sum()]))

    def add_maxima(self, values: Mapping[str, torch.Tensor]) -> None:
        """(N,) values, none below 0, whose maximum over chosen tokens is kept."""
        for name, value_N in values.items():
            largest = (value_N.double() * self._mask_N).max()
            before = self._maxima.get(name, largest)
            self._maxima[name] = torch.maximum(before, largest)

    def reduce(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """The step's metrics over the ranks of ``group``, which have samples of their own each, and
        ``update/trained_tokens``. Collective; None: all ranks."""
        groups = (self._totals, self._over_tokens, self._as_loss, self._sizes)
        vectors = [v.reshape(-1) for group in groups for v in group.values()]
        sums = torch.cat([torch.stack([self._tokens, self._weight]), *vectors])
        dist.all_reduce(sums, group=group)
        tokens, weight, *values = sums.tolist()
        left = iter(values)
        metrics = {"update/trained_tokens": tokens}
        metrics |= {name: next(left) for name in self._totals}
        metrics |= {name: next(left) / tokens for name in self._over_tokens}
        metrics |= {name: next(left) / weight for name in self._as_loss}
        for name in self._sizes:
            total, squares = next(left), next(left)
            # Weights that are all 0 leave no sample.
            metrics[name] = total**2 / (tokens * squares) if squares else 0.0
        return metrics | self._reduce_maxima(group)

    def _reduce_maxima(self, group: dist.ProcessGroup | None) -> dict[str, float]:
        maxima = torch.stack([self._zero(), *self._maxima.values()])
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        return dict(zip(self._maxima, maxima[1:].tolist(), strict=True))

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device)


def _add(sums: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value
