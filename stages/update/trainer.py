"""One rank of the trainer: FSDP2 over a Hugging Face model, its optimizer, and what is kept.

Shapes: N response tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from artifacts.manifests import Ref, Shard
from artifacts.shards import read_shard
from artifacts.store import Store
from stages.arrays import array_of
from stages.contract import StageError
from stages.logprobs import LogprobModel
from stages.models import device_of_this_process, load_causal_lm, model_digest
from stages.update.config import UpdateConfig
from stages.update.critic import Critic
from stages.update.critic_name import CriticName, critic_of
from stages.update.digests import weights_digest
from stages.update.group import join_group, listen
from stages.update.mesh import RankMesh
from stages.update.microbatch import MicroBatch
from stages.update.phases import Phases, total_memory
from stages.update.randomness import seed_step
from stages.update.samples import Samples, read_samples, split_minibatches
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
from stages.update.snapshot import Snapshot, read_critic, read_snapshot, write_snapshot
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
        self._critic: Critic | None = None
        # Where the critic lies that belongs to the policy that was loaded, until one asks for it.
        self._critic_at: tuple[Store, Ref] | None = None

    def listen(self) -> tuple[str, int]:
        """Rank 0: open the meeting place, and say where."""
        self._meeting, address = listen(self._world)
        return address

    def join(self, address: tuple[str, int]) -> None:
        """Meet the other ranks."""
        join_group(self._rank, self._world, address, self._device, getattr(self, "_meeting", None))
        self._mesh = RankMesh.of(self._device, self._spec.config.sp)

    def total_memory(self) -> int:
        """Bytes that this rank's device has."""
        return total_memory(self._device)

    def load(self, store: Store, snapshot: Ref | None, checkpoints: bool) -> None:
        """Take the state of ``snapshot``, or that of the base model at step 0.

        ``checkpoints``: whether activations are made again in backward.
        """
        config = self._spec.config.model_copy(update={"activation_checkpointing": checkpoints})
        self._spec = replace(self._spec, config=config)
        saved = None if snapshot is None else read_snapshot(store, snapshot)
        self._take(saved)
        if snapshot is not None and saved is not None and "critic" in saved.state:
            self._critic_at = store, snapshot

    def values(
        self, store: Store, folder: str, shard: Shard, critic: CriticName, config: UpdateConfig
    ) -> list[np.ndarray]:
        """``critic``'s values for the samples of a rollout shard, as ``config`` says to compute."""
        self._adopt(replace(self._spec, config=config))
        rows = read_shard(store, folder, shard, ("prompt_ids", "response_ids"))
        columns = (rows[name].to_pylist() for name in ("prompt_ids", "response_ids"))
        sequences = list(zip(*columns, strict=True))
        values = self._critic_named(critic).values(sequences, config.max_tokens_per_rank)
        return values if self._rank == 0 else []

    def update(self, store: Store, order: UpdateOrder) -> UpdateResult | None:
        """Do an iteration's optimizer steps. The result is rank 0's; the others return None."""
        self._adopt(self._spec.under(order))
        spec, phases = self._spec, Phases(self._device)
        critic = self._critic_for(order)
        with phases("read"):
            samples = read_samples(store, order.inputs, spec.config, spec.on_null, order.wanted)
        minibatches = split_minibatches(samples.groups, spec.config.minibatches, samples.chosen_S)
        plans = self._plans(samples, minibatches, critic)
        with phases("old_logprobs"):
            old = self._old_logprobs(samples, plans)
        steps = []
        step_of_sample: list[int | None] = [None] * len(samples)
        with phases("steps"):
            for indices, plan in zip(minibatches, plans, strict=True):
                seed_step(order.inputs["rollout"].digest, self._step, self._mesh.dp_rank)
                steps.append(self._optimizer_step(samples, indices, plan, old))
                if critic is not None:
                    steps[-1] |= critic.learn(samples, indices, spec.config, spec.total_steps)
                for i in indices:
                    step_of_sample[i] = self._step
        with phases("digest"):
            stock = self._take_stock()
            values = [] if critic is None else critic.stock(keep=self._rank == 0)
        memory: list[Any] = [None] * self._world
        dist.all_gather_object(memory, phases.memory)
        if self._rank != 0:
            return None
        return UpdateResult(
            weights_digest(stock),
            [*stock, *({**record, "name": f"critic.{record['name']}"} for record in values)],
            steps,
            samples,
            step_of_sample,
            phases.seconds,
            None if critic is None else weights_digest(values),
            memory,
        )

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
        ours = self._state(keep=self._rank == 0)
        if self._rank != 0:
            return {}
        found = _distances("", ours, read_snapshot(store, snapshot))
        return found | _distances("critic.", ours.critic, read_critic(store, snapshot))

    def save(self, store: Store, folder: str) -> list[Shard]:
        """Write a snapshot in ``folder``; rank 0 returns its files."""
        state = self._state(keep=self._rank == 0)
        return write_snapshot(store, folder, state) if self._rank == 0 else []

    def _take(self, saved: Snapshot | None) -> None:
        """Build the sharded model and its optimizer, in the state of ``saved``."""
        model = load_causal_lm(self._spec.model, torch.float32)
        if saved is not None:
            put_weights(model, saved)
        config = self._spec.config
        if config.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self._model = shard_model(
            LogprobModel(model.to(self._device)), self._mesh.everyone, config
        ).train()
        self._optimizer = make_optimizer(self._model, config)
        self._step, self._taken, self._handover = 0, 0, {}
        if saved is not None:
            self._step, self._taken = int(saved.state["step"]), int(saved.state["taken"])
            restore_moments(self._optimizer, self._model, saved, self._taken)
        self._critic, self._critic_at = None, None
        if saved is not None and saved.critic is not None:
            self._critic = self._load_critic(saved.critic.state["base"], saved.critic)

    def _state(self, keep: bool) -> Snapshot:
        self._fetch_critic()
        tensors = full_tensors(self._model, self._optimizer, keep)
        critic = None if self._critic is None else self._critic.state(keep)
        return Snapshot(tensors, {"step": self._step, "taken": self._taken}, critic)

    def _adopt(self, spec: TrainerSpec) -> None:
        """Compute as ``spec`` says; what models were built for may change with it."""
        before, self._spec = self._spec.config, spec
        built_for = ("dtype", "betas", "adam_eps", "weight_decay")
        if any(getattr(before, name) != getattr(spec.config, name) for name in built_for):
            self._take(self._state(keep=True))

    def _critic_for(self, order: UpdateOrder) -> Critic | None:
        """The critic that the order's update teaches; where it teaches none, none is kept."""
        name = critic_of(order.identity)
        if name is None:
            self._critic, self._critic_at = None, None
            return None
        return self._critic_named(name)

    def _critic_named(self, name: CriticName) -> Critic:
        """The critic of that name: the one in hand, or that of the loaded policy, or a new one."""
        if name.version > 0:
            self._fetch_critic()
        critic = self._critic
        if critic is not None and (critic.base, critic.version) == (name.base, name.version):
            return critic
        if name.version > 0:
            raise RuntimeError(f"asked for {name}, and this rank holds no such critic")
        self._critic, self._critic_at = self._load_critic(name.base, None), None
        return self._critic

    def _fetch_critic(self) -> None:
        if self._critic is None and self._critic_at is not None:
            saved, self._critic_at = read_critic(*self._critic_at), None
            assert saved is not None
            self._critic = self._load_critic(saved.state["base"], saved)

    def _load_critic(self, base: str, saved: Snapshot | None) -> Critic:
        config = self._spec.config
        folder = (config.critic.model if config.critic else None) or self._spec.model
        if saved is None and model_digest(folder) != base:
            raise StageError(
                f"the critic begins at a model of digest {base[:16]}, and {folder} is another one: "
                "give update.critic.model the folder that it was started from"
            )
        return Critic(folder, base, config, self._mesh, saved)

    def _take_stock(self) -> list[dict[str, Any]]:
        """A record of each float32 tensor, on rank 0. Keeps them in the engine's type too."""
        dtype = getattr(torch, self._spec.handover_dtype)
        self._handover = {}

        def hand_over(name: str, whole: torch.Tensor) -> None:
            self._handover[name] = array_of(whole.to(dtype).cpu())

        return weight_records(self._model, self._rank == 0, hand_over)

    def _plans(
        self, samples: Samples, minibatches: Sequence[Sequence[int]], critic: Critic | None
    ) -> list[StepPlan]:
        """What each step trains the policy on: nothing while its critic warms up."""
        config = self._spec.config
        warmup = config.critic.warmup_iterations if config.critic else 0
        if critic is not None and critic.version < warmup:
            return [StepPlan([], {}) for _ in minibatches]
        return [plan_step(samples, indices, config) for indices in minibatches]

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
            batch = MicroBatch.of(samples, members, None, self._device, ranks=self._mesh.sequence)
            logprobs_N, _ = self._model(batch.packed, self._spec.temperature)
            split = logprobs_N.cpu().split(batch.sequence_N.bincount().tolist())
            # An empty micro-batch has sequences of nobody.
            parts += [(i, part.numpy()) for i, part in zip(members, split, strict=False)]
        gathered: list[Any] = [None] * self._mesh.num_dp
        dist.all_gather_object(gathered, parts, group=self._mesh.dp_group)
        old = [np.zeros(len(response), np.float32) for _, response in samples.sequences]
        for i, part in (pair for rank in gathered for pair in rank):
            old[i] = part
        return old

    def _my_microbatches(
        self, samples: Samples, units: Sequence[tuple[int, ...]]
    ) -> list[list[int]]:
        mesh = self._mesh
        budget = mesh.tokens_per_row(self._spec.config.max_tokens_per_rank)
        return microbatches_of(samples, units, budget, mesh.dp_rank, mesh.num_dp)

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
                self._model,
                samples,
                step,
                microbatches,
                old,
                config,
                self._spec.temperature,
                self._mesh.sequence,
            )
            norm = apply_gradients(self._model, self._optimizer, lr, config.max_grad_norm)
            self._taken += 1
        self._step += 1
        return {
            "step": self._step,
            "update/lr": lr,
            "update/grad_norm": norm,
            "update/trained_samples": step.num_samples,
            "update/left_out_samples": len(indices) - int(samples.weights_S[list(indices)].sum()),
            "update/skipped_steps": 0.0 if step.units else 1.0,
            **sums.reduce(self._mesh.dp_group),
        }


def _distances(prefix: str, ours: Snapshot | None, theirs: Snapshot | None) -> dict[str, float]:
    """Of each weight that both have."""
    if ours is None or theirs is None:
        return {}
    old = theirs.tensors["weights"]
    return {
        f"{prefix}{name}": float(np.abs(array - old[name]).max())
        for name, array in ours.tensors["weights"].items()
    }
