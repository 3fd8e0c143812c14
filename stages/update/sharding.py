"""FSDP2 over a Hugging Face model, its optimizer, and whole tensors out of both.

A *wrapped* model has the Hugging Face one as its attribute ``model``, and all of the computation in
its own forward, so that FSDP's root hooks surround it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from stages.arrays import array_of
from stages.update.config import UpdateConfig
from stages.update.digests import tensor_records
from stages.update.snapshot import Snapshot


def shard_model(wrapped: Any, mesh: DeviceMesh, config: UpdateConfig) -> Any:
    """Each decoder layer a unit, embeddings and head the root's; gradients are summed."""
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32
    )
    for layer in decoder_layers(wrapped.model):
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


def apply_gradients(
    model: Any, optimizer: torch.optim.AdamW, lr: float, max_grad_norm: float
) -> float:
    """Take a step down ``model``'s gradients, clipped to a norm; returns the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def weight_records(
    model: Any, keep: bool, hand_over: Callable[[str, torch.Tensor], None] | None = None
) -> list[dict[str, Any]]:
    """A record of each weight, float32 and whole; [] unless ``keep``. Collective.

    Args:
        hand_over: is given each whole tensor, on its device, where they are kept: one gathering
            serves both.
    """
    masters: dict[str, tuple[str, np.ndarray]] = {}
    norms: dict[str, torch.Tensor] = {}
    model.reshard()  # a forward without a backward leaves the root's weights whole
    for name, parameter in model.model.named_parameters():
        whole = parameter.detach().full_tensor()
        if not keep:
            continue
        if hand_over is not None:
            hand_over(name, whole)
        masters[name] = array_of(whole.cpu())
        if whole.is_cuda:  # a CPU would be the slower of the two
            norms[name] = torch.linalg.vector_norm(whole, dtype=torch.float64)
    return tensor_records(masters, {name: float(norm) for name, norm in norms.items()})


def put_weights(model: Any, saved: Snapshot) -> None:
    """Give ``model``, not sharded yet, the weights of ``saved``."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(saved.tensors["weights"][name]))


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
