"""FSDP2 over a Hugging Face model, its optimizer, and whole tensors out of both."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from stages.logprobs import LogprobModel
from stages.update.config import UpdateConfig
from stages.update.snapshot import Snapshot


def shard_model(model: Any, mesh: DeviceMesh, config: UpdateConfig) -> Any:
    """Each decoder layer a unit, embeddings and head the root's; gradients are summed."""
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32
    )
    wrapped = LogprobModel(model)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The head is used after the root's forward, in backward too: keep its weights whole.
    fully_shard(wrapped, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            # A factor of 1 alone asks gloo for PREMUL_SUM, which it has not.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return wrapped


def decoder_layers(model: Any) -> Iterator[torch.nn.Module]:
    """The layers that the model itself says are not to be split."""
    names = set(model._no_split_modules or [])
    for module in model.modules():
        if type(module).__name__ in names:
            yield module


def make_optimizer(model: Any, config: UpdateConfig) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices alone, as biases and norms have no scale to shrink."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.adam_eps, fused=True
    )


def full_tensors(
    model: Any, optimizer: torch.optim.AdamW, keep: bool
) -> dict[str, dict[str, np.ndarray]]:
    """Weights and moments as whole arrays. Collective; only where ``keep`` are they kept."""
    tensors: dict[str, dict[str, np.ndarray]] = {"weights": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, parameter in model.model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for kind, values in tensors.items():
            sharded = parameter.detach() if kind == "weights" else state.get(kind)
            if sharded is None:
                # No step was taken yet: the moments are 0.
                sharded = torch.zeros_like(parameter)
            whole = sharded.full_tensor().cpu()
            if keep:
                values[name] = whole.numpy()
    return tensors


def restore_moments(optimizer: torch.optim.AdamW, model: Any, saved: Snapshot, taken: int) -> None:
    """Give the optimizer back the moments of ``saved``, after ``taken`` steps."""
    for name, parameter in model.model.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(taken), device=parameter.device),
            **{
                kind: distribute_tensor(
                    torch.from_numpy(saved.tensors[kind][name]).to(parameter.device),
                    parameter.device_mesh,
                    parameter.placements,
                    src_data_rank=None,
                )
                for kind in ("exp_avg", "exp_avg_sq")
            },
        }
