"""Ulysses: ranks that share a row of tokens, and meet only where tokens do, in attention.

Each rank holds a slice of the row in every layer. Around attention an all-to-all swaps "my tokens,
all heads" for "all tokens, my heads", so that any attention over whole rows runs in between, and
another one swaps back. Knows nothing of what a row is made of (``stages/packed.py`` does).
DeepSpeed-Ulysses, arXiv:2309.14509.

Shapes: R ranks, T tokens in the row, H heads, K key/value heads, D head width; N entries of
something that tokens have, of which this rank has n.

Backward, and the second forward of checkpointed layers, repeat the collectives: all ranks of a
group run the same micro-batches, in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that share rows, and which of them this is: ``rank`` of ``size``."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "SequenceRanks":
        """Those along a mesh of one axis."""
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size())


def attend_by_heads(
    attend: Attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: SequenceRanks
) -> torch.Tensor:
    """``attend`` over whole rows, from slices and to slices.

    Args:
        attend: (1, H/R, T, D) queries, and keys and values of as many heads or a divisor, to
            (1, T, H/R, D).
        q, k, v: (1, H, T/R, D), (1, K, T/R, D) twice.

    Returns:
        (1, T/R, H, D).
    """
    num_heads = q.shape[1]
    q, k, v = (seq_to_heads(x, ranks) for x in divisible_heads(q, k, v, ranks.size))
    out = attend(q, k, v).transpose(1, 2)  # (1, H/R, T, D)
    return heads_to_seq(out, ranks)[:, :num_heads].transpose(1, 2)


def divisible_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same attention in heads that ``size`` ranks can share out.

    Fewer key/value heads than ranks are repeated, so that each rank has the one that its queries
    read. Where that doesn't come out even, each query gets a key/value head of its own, and heads
    of zeros fill up; what those give is to be thrown away.
    """
    num_heads, num_kv = q.shape[1], k.shape[1]
    if num_heads % size or (num_kv % size and size % num_kv):
        k, v = (x.repeat_interleave(num_heads // num_kv, dim=1) for x in (k, v))
        q, k, v = (pad(x, (0, 0, 0, 0, 0, -num_heads % size)) for x in (q, k, v))
    elif num_kv % size:
        k, v = (x.repeat_interleave(size // num_kv, dim=1) for x in (k, v))
    return q, k, v


def seq_to_heads(x: torch.Tensor, ranks: SequenceRanks) -> torch.Tensor:
    """(1, H, T/R, D) to (1, H/R, T, D)."""
    parts = x[0].unflatten(0, (ranks.size, -1))  # (R, H/R, T/R, D): the heads of each rank
    parts = _AllToAll.apply(parts, ranks.group)  # (R, H/R, T/R, D): my heads, of each rank's tokens
    return parts.transpose(0, 1).flatten(1, 2)[None]


def heads_to_seq(x: torch.Tensor, ranks: SequenceRanks) -> torch.Tensor:
    """(1, H/R, T, D) to (1, H, T/R, D)."""
    parts = x[0].unflatten(1, (ranks.size, -1)).transpose(0, 1)  # (R, H/R, T/R, D): its tokens
    parts = _AllToAll.apply(parts, ranks.group)  # (R, H/R, T/R, D): my tokens, of each rank's heads
    return parts.flatten(0, 1)[None]


def gather_slices(
    slice_n: torch.Tensor, counts: Sequence[int], ranks: SequenceRanks
) -> torch.Tensor:
    """(n,) on each rank to (N,) on all, in the order of ranks, bit by bit the same everywhere.

    Made for a loss that all ranks compute of all N alike: backward gives each rank its own slice of
    the gradient, and no sum over ranks is taken, as it would count each entry R times.

    Args:
        counts: n of each rank.
    """
    start = sum(counts[: ranks.rank])
    whole: torch.Tensor = _Gather.apply(slice_n, start, sum(counts), ranks.group)
    return whole


class _AllToAll(torch.autograd.Function):
    """(R, ...) to (R, ...): entry r goes to rank r. It is its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x = x.contiguous()  # empty_like would keep a transposed tensor's strides
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllToAll.apply(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    """See :func:`gather_slices`. A sum of disjoint slices: they are of uneven length, and adding
    zeros rounds nothing."""

    @staticmethod
    def forward(
        ctx: Any, slice_n: torch.Tensor, start: int, num: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.mine = slice(start, start + len(slice_n))
        whole_N = slice_n.new_zeros(num)
        whole_N[ctx.mine] = slice_n
        dist.all_reduce(whole_N, group=group)
        return whole_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0][ctx.mine], None, None, None
