"""One rank of the trainer: FSDP2 over a Hugging Face model, its optimizer, and what is kept.

Shapes: N response tokens of a micro-batch.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from artifacts.manifests import Ref, Shard
from artifacts.store import Store
from stages.arrays import array_of
from stages.models import device_of_this_process, load_causal_lm
from stages.update.digests import tensor_records, weights_digest
from stages.update.group import join_group, listen
from stages.update.microbatch import MicroBatch
from stages.update.randomness import seed_step
from stages.update.samples import Samples, read_samples, split_minibatches
from stages.update.schedule import learning_rate
from stages.update.sharding import full_tensors, make_optimizer, restore_moments, shard_model
from stages.update.snapshot import Snapshot, read_snapshot, write_snapshot
from stages.update.step import StepPlan, accumulate_gradients, microbatches_of, plan_step
from stages.update.step_sums import StepSums
from stages.update.trainer_spec import TrainerSpec, UpdateOrder, UpdateResult


class TrainerRank:
    """See the module's docstring. Methods that touch weights are collective: call all ranks."""

    def __init__(self, rank: int, world: int, spec: TrainerSpec) -> None:
        self._rank, self._world, self._spec = rank, world, spec
        self._device = device_of_this_process()
        self._handover: dict[str, tuple[str, np.ndarray]] = {}
        self._step = 0  # finished, skipped ones included: what the schedule counts
        self._taken = 0  # what Adam counts

    def listen(self) -> tuple[str, int]:
        """Rank 0: open the meeting place, and say where."""
        self._meeting, address = listen(self._world)
        return address

    def join(self, address: tuple[str, int]) -> None:
        """Meet the other ranks."""
        join_group(self._rank, self._world, address, self._device, getattr(self, "_meeting", None))
        self._mesh = init_device_mesh(self._device.type, (self._world,), mesh_dim_names=("dp",))

    def load(self, store: Store, snapshot: Ref | None) -> None:
        """Take the state of ``snapshot``, or that of the base model at step 0."""
        self._take(None if snapshot is None else read_snapshot(store, snapshot))

    def update(self, store: Store, order: UpdateOrder) -> UpdateResult | None:
        """Do an iteration's optimizer steps. The result is rank 0's; the others return None."""
        seconds: dict[str, float] = {}
        self._follow(order)
        spec, start = self._spec, time.perf_counter()
        samples = read_samples(store, order.inputs, spec.config, spec.on_null, order.wanted)
        seconds["read"] = time.perf_counter() - start
        minibatches = split_minibatches(samples.groups, spec.config.minibatches, samples.chosen_S)
        plans = [plan_step(samples, indices, spec.config) for indices in minibatches]
        old = self._old_logprobs(samples, plans)
        steps = []
        step_of_sample: list[int | None] = [None] * len(samples)
        start = time.perf_counter()
        for indices, plan in zip(minibatches, plans, strict=True):
            seed_step(order.inputs["rollout"].digest, self._step, self._rank)
            steps.append(self._optimizer_step(samples, indices, plan, old))
            for i in indices:
                step_of_sample[i] = self._step
        seconds["steps"] = time.perf_counter() - start
        start = time.perf_counter()
        tensors = self._take_stock()
        seconds["digest"] = time.perf_counter() - start
        if self._rank != 0:
            return None
        digest = weights_digest(tensors)
        return UpdateResult(digest, tensors, steps, samples, step_of_sample, seconds)

    def weights(self) -> dict[str, tuple[str, np.ndarray]]:
        """Rank 0: the weights in the engine's type, for hand-over (``stages/arrays.py``)."""
        if not self._handover:
            raise RuntimeError("there are no weights to hand over before an update or take_stock")
        return self._handover

    def is_alive(self) -> bool:
        """True, after all that was asked before."""
        return True

    def take_stock(self) -> str:
        """Gather the weights for hand-over, as after an update. Returns their digest."""
        return weights_digest(self._take_stock())

    def distances(self, store: Store, snapshot: Ref) -> dict[str, float]:
        """Largest distance of an entry of each tensor from ``snapshot``'s; rank 0's answer."""
        ours = self._state(keep=self._rank == 0).tensors["weights"]
        if self._rank != 0:
            return {}
        theirs = read_snapshot(store, snapshot).tensors["weights"]
        return {name: float(np.abs(array - theirs[name]).max()) for name, array in ours.items()}

    def save(self, store: Store, folder: str) -> list[Shard]:
        """Write a snapshot in ``folder``; rank 0 returns its files."""
        state = self._state(keep=self._rank == 0)
        return write_snapshot(store, folder, state) if self._rank == 0 else []

    def _take(self, saved: Snapshot | None) -> None:
        """Build the sharded model and its optimizer, in the state of ``saved``."""
        model = load_causal_lm(self._spec.model, torch.float32)
        if saved is not None:
            _put_weights(model, saved)
        config = self._spec.config
        if config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._model = shard_model(model.to(self._device), self._mesh, config).train()
        self._optimizer = make_optimizer(self._model, config)
        self._step, self._taken, self._handover = 0, 0, {}
        if saved is not None:
            self._step, self._taken = int(saved.state["step"]), int(saved.state["taken"])
            restore_moments(self._optimizer, self._model, saved, self._taken)

    def _state(self, keep: bool) -> Snapshot:
        tensors = full_tensors(self._model, self._optimizer, keep)
        return Snapshot(tensors, {"step": self._step, "taken": self._taken})

    def _follow(self, order: UpdateOrder) -> None:
        """Compute as the order's identity says; what the model was built for may change with it."""
        before, self._spec = self._spec.config, self._spec.under(order)
        built_for = ("dtype", "betas", "adam_eps", "weight_decay")
        if any(getattr(before, name) != getattr(self._spec.config, name) for name in built_for):
            self._take(self._state(keep=True))

    def _take_stock(self) -> list[dict[str, Any]]:
        """A record of each float32 tensor, on rank 0. Keeps them in the engine's type too, as
        one gathering serves both."""
        dtype = getattr(torch, self._spec.handover_dtype)
        masters: dict[str, tuple[str, np.ndarray]] = {}
        norms: dict[str, torch.Tensor] = {}
        self._handover = {}
        self._model.reshard()  # a forward without a backward leaves the root's weights whole
        for name, parameter in self._model.model.named_parameters():
            whole = parameter.detach().full_tensor()
            if self._rank == 0:
                self._handover[name] = array_of(whole.to(dtype).cpu())
                masters[name] = array_of(whole.cpu())
                if whole.is_cuda:  # a CPU would be the slower of the two
                    norms[name] = torch.linalg.vector_norm(whole, dtype=torch.float64)
        return tensor_records(masters, {name: float(norm) for name, norm in norms.items()})

    def _old_logprobs(self, samples: Samples, steps: Sequence[StepPlan]) -> list[np.ndarray] | None:
        """The ratio's denominators, a sample; None: the step's own, as there is only one step, or
        no ratio."""
        if self._spec.config.old_logprobs == "sampler":
            return samples.sampler_logprobs
        if len(steps) == 1 or self._spec.config.compares_pairs:
            return None
        return self._recompute(samples, steps)

    @torch.no_grad()
    def _recompute(self, samples: Samples, steps: Sequence[StepPlan]) -> list[np.ndarray]:
        units = [unit for step in steps for unit in step.units]
        parts: list[tuple[int, np.ndarray]] = []
        for members in self._my_microbatches(samples, units):
            batch = MicroBatch.of(samples, members, None, self._device)
            logprobs_N, _ = self._model(batch.packed, self._spec.temperature)
            split = logprobs_N.cpu().split(batch.sequence_N.bincount().tolist())
            # An empty micro-batch has sequences of nobody.
            parts += [(i, part.numpy()) for i, part in zip(members, split, strict=False)]
        gathered: list[Any] = [None] * self._world
        dist.all_gather_object(gathered, parts)
        old = [np.zeros(len(response), np.float32) for _, response in samples.sequences]
        for i, part in (pair for rank in gathered for pair in rank):
            old[i] = part
        return old

    def _my_microbatches(
        self, samples: Samples, units: Sequence[tuple[int, ...]]
    ) -> list[list[int]]:
        budget = self._spec.config.max_tokens_per_rank
        return microbatches_of(samples, units, budget, self._rank, self._world)

    def _optimizer_step(
        self,
        samples: Samples,
        indices: Sequence[int],
        step: StepPlan,
        old: Sequence[np.ndarray] | None,
    ) -> dict[str, float]:
        config = self._spec.config
        lr = learning_rate(config, self._step, self._spec.total_steps)
        sums, norm = StepSums(self._device), 0.0
        if step.units:
            microbatches = self._my_microbatches(samples, step.units)
            sums = accumulate_gradients(
                self._model, samples, step, microbatches, old, config, self._spec.temperature
            )
            norm = self._apply(lr)
        self._step += 1
        return {
            "step": self._step,
            "update/lr": lr,
            "update/grad_norm": norm,
            "update/trained_samples": step.num_samples,
            "update/left_out_samples": len(indices) - int(samples.weights_S[list(indices)].sum()),
            "update/skipped_steps": 0.0 if step.units else 1.0,
            **sums.reduce(),
        }

    def _apply(self, lr: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), self._spec.config.max_grad_norm
        )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._taken += 1
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _put_weights(model: Any, saved: Snapshot) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(saved.tensors["weights"][name]))
