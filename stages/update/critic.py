"""One rank's part of a critic: its value model, sharded, and its optimizer.

Values are computed where the critic learns, by the same sharded weights: a critic need fit on no
other worker, nothing of it travels, and what it scored is where its next update begins.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from stages.models import load_value_model
from stages.packed import pack
from stages.packing import plan_microbatches
from stages.update.config import UpdateConfig
from stages.update.mesh import RankMesh
from stages.update.samples import Samples
from stages.update.schedule import learning_rate
from stages.update.sharding import (
    apply_gradients,
    full_tensors,
    make_optimizer,
    put_weights,
    restore_moments,
    shard_model,
    weight_records,
)
from stages.update.snapshot import Snapshot
from stages.update.step import microbatches_of
from stages.update.value_model import ValueModel
from stages.update.value_step import accumulate_value_gradients, value_metrics

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]


class Critic:
    """See the module's docstring. All methods are collective: call all ranks.

    Attributes:
        base: digest of the folder that it began as.
        version: number of updates behind its weights.
    """

    def __init__(
        self,
        folder: str,
        base: str,
        config: UpdateConfig,
        mesh: RankMesh,
        saved: Snapshot | None = None,
    ) -> None:
        """Load ``folder``, and take the state of ``saved``; without one it is at version 0."""
        model = load_value_model(folder)
        state: Mapping[str, Any] = {"step": 0, "taken": 0, "version": 0}
        if saved is not None:
            put_weights(model, saved)
            state = saved.state
        if config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._model = shard_model(ValueModel(model.to(mesh.device)), mesh.everyone, config).train()
        self._optimizer = make_optimizer(self._model, config)
        self._mesh = mesh
        self.base, self.version = base, int(state["version"])
        self._step, self._taken = int(state["step"]), int(state["taken"])
        if saved is not None:
            restore_moments(self._optimizer, self._model, saved, self._taken)

    @torch.no_grad()
    def values(self, sequences: Sequences, max_tokens: int) -> list[np.ndarray]:
        """(T,) float32 for each (prompt, response): the value of the state before each token."""
        lengths = [len(prompt) + len(response) for prompt, response in sequences]
        mesh, budget = self._mesh, self._mesh.tokens_per_row(max_tokens)
        shortest = min(range(len(lengths)), key=lengths.__getitem__)
        parts: list[tuple[int, np.ndarray]] = []
        self._model.eval()
        for members in plan_microbatches(lengths, budget, mesh.num_dp)[mesh.dp_rank]:
            # Every rank has to take part in every collective: without a sequence of its own, with
            # one whose values it throws away.
            taken = [sequences[i] for i in members or [shortest]]
            values_N = self._model(pack(taken, mesh.device, mesh.sequence)).cpu()
            split = values_N.split([len(response) for _, response in taken])
            parts += [(i, part.numpy()) for i, part in zip(members, split, strict=False)]
        self._model.train()
        self._model.reshard()  # a forward without a backward leaves the root's weights whole
        gathered: list[Any] = [None] * mesh.num_dp
        dist.all_gather_object(gathered, parts, group=mesh.dp_group)
        found = dict(pair for part in gathered for pair in part)
        return [found[i] for i in range(len(sequences))]

    def learn(
        self, samples: Samples, indices: Sequence[int], config: UpdateConfig, total_steps: int
    ) -> dict[str, float]:
        """Do the critic's part of an optimizer step on ``indices``; returns its metrics.

        Every sample with weight and a chosen token teaches, whatever its advantage.
        """
        assert config.critic is not None
        counts = {i: int(samples.loss_masks[i].sum()) for i in indices if samples.weights_S[i] > 0}
        units = [(i,) for i, count in counts.items() if count > 0]
        lr = learning_rate(config.critic, self._step, total_steps)
        metrics = {"critic/lr": lr, "critic/skipped_steps": 0.0 if units else 1.0}
        self._step += 1
        if not units:
            return metrics
        mesh, budget = self._mesh, self._mesh.tokens_per_row(config.max_tokens_per_rank)
        sums = accumulate_value_gradients(
            self._model,
            samples,
            microbatches_of(samples, units, budget, mesh.dp_rank, mesh.num_dp),
            sum(counts.values()),
            config.critic.value_clip,
            mesh.sequence,
        )
        norm = apply_gradients(self._model, self._optimizer, lr, config.critic.max_grad_norm)
        self._taken += 1
        return {**metrics, "critic/grad_norm": norm, **value_metrics(sums.reduce(mesh.dp_group))}

    def stock(self, keep: bool) -> list[dict[str, Any]]:
        """End an update: what is held is the next version. A record of each of its float32
        weights; [] unless ``keep``."""
        self.version += 1
        return weight_records(self._model, keep)

    def state(self, keep: bool) -> Snapshot:
        """Weights, moments and counts; tensors only where ``keep``."""
        numbers = {
            "step": self._step,
            "taken": self._taken,
            "version": self.version,
            "base": self.base,
        }
        return Snapshot(full_tensors(self._model, self._optimizer, keep), numbers)
