"""Sequences packed end to end in one row, each attending to itself alone.

Shapes: T tokens in the row, N response tokens in it, H heads, D head width. Where ranks share the
row (``stages/sequence_parallel.py``), t and n are this rank's part of T and N; else they are T
and N.

Any transformers decoder is served through its attention interface: the model is made with
``attn_implementation=ATTENTION``, and the segments of the row in hand reach the attention function
through a context, so no mask is ever built.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from stages.sequence_parallel import SequenceRanks, attend_by_heads, gather_slices

ATTENTION = "ratchet_packed"


@dataclass(frozen=True)
class Packed:
    """One packed row, or a rank's slice of it.

    Attributes:
        input_ids, position_ids: (1, t); positions count from 0 in each segment.
        lengths: tokens of each segment of the row, in order.
        boundaries: (segments + 1,) int32, where each segment starts, and T.
        sources_n: places in the slice that predict a response token.
        targets_n: those response tokens.
        ranks: which ranks share the row; None: it is whole here.
        counts: n of each of them, or N alone.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...]
    boundaries: torch.Tensor
    sources_n: torch.Tensor
    targets_n: torch.Tensor
    ranks: SequenceRanks | None
    counts: tuple[int, ...]

    def whole(self, values_n: torch.Tensor) -> torch.Tensor:
        """(N,) of all of the row's response tokens, as every rank of it gets them.

        Its gradient is right where all of them compute the same loss of it.
        """
        if self.ranks is None:
            return values_n
        return gather_slices(values_n, self.counts, self.ranks)


def pack(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    device: torch.device,
    ranks: SequenceRanks | None = None,
) -> Packed:
    """Pack (prompt ids, response ids) pairs, and take this rank's slice where ``ranks`` share them.

    A response's last token predicts nothing that is asked for, so it is left out of the input. The
    token that a place predicts is looked up before the row is cut: no slice needs its neighbour.
    """
    ids: list[int] = []
    positions: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    boundaries = [0]
    for prompt, response in sequences:
        first = len(ids) + len(prompt) - 1
        ids += [*prompt, *response[:-1]]
        positions += range(len(ids) - boundaries[-1])
        sources += range(first, first + len(response))
        targets += response
        boundaries.append(len(ids))
    size, rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
    if missing := -len(ids) % size:  # a segment that nothing is asked of makes slices equal
        ids += [0] * missing
        positions += range(missing)
        boundaries.append(len(ids))
    t = len(ids) // size
    start = rank * t
    cuts = [bisect_left(sources, r * t) for r in range(size + 1)]  # sources are in order
    mine = slice(cuts[rank], cuts[rank + 1])

    def row(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return Packed(
        row(ids[start : start + t])[None],
        row(positions[start : start + t])[None],
        tuple(b - a for a, b in pairwise(boundaries)),
        torch.tensor(boundaries, dtype=torch.int32, device=device),
        row([place - start for place in sources[mine]]),
        row(targets[mine]),
        ranks,
        tuple(b - a for a, b in pairwise(cuts)),
    )


_segments: Packed | None = None


@contextmanager
def segments_of(batch: Packed) -> Iterator[None]:
    """Attention inside knows the row's segments; backward has to run inside too, as checkpointed
    layers run once more there."""
    global _segments
    before, _segments = _segments, batch
    try:
        yield
    finally:
        _segments = before


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """(1, H, t, D) queries to (1, t, H, D), causal in each segment."""
    if _segments is None:
        raise RuntimeError("run the model inside segments_of(batch)")
    # Models with such layers are refused by their configuration (stages/attention_layers.py): this
    # is for a family whose configuration doesn't show them.
    is_bounded = sliding_window is not None and sliding_window < max(_segments.lengths)
    if is_bounded or softcap is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError("sliding window, softcap and sinks are not served")
    if dropout:
        raise NotImplementedError("dropout in attention is not served")
    on_device = _attend_on_gpu if query.is_cuda else _attend_on_cpu
    attend = partial(on_device, batch=_segments, scale=scaling)
    if _segments.ranks is None:
        return attend(query, key, value), None
    return attend_by_heads(attend, query, key, value, _segments.ranks).contiguous(), None


def _attend_on_gpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Packed, scale: float | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if q.dtype == torch.float32:
        return _attend_on_cpu(q, k, v, batch, scale)  # flash attention is for half precision
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    longest, ends = max(batch.lengths), batch.boundaries
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scale, window_size=(-1, 0))
    return out[None]


def _attend_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Packed, scale: float | None
) -> torch.Tensor:
    """One SDPA call for each run of segments of one length: no T x T mask."""
    outs = []
    start = 0
    for length, run in groupby(batch.lengths):
        n = len(list(run))
        q_n, k_n, v_n = (_stack(x, start, n, length) for x in (q, k, v))
        out = scaled_dot_product_attention(
            q_n, k_n, v_n, is_causal=True, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
        )
        outs.append(out.transpose(1, 2).reshape(1, n * length, q.shape[1], q.shape[3]))
        start += n * length
    return torch.cat(outs, dim=1)


def _stack(x: torch.Tensor, start: int, n: int, length: int) -> torch.Tensor:
    """(1, H, T, D) to (n, H, length, D): n segments of one length, from ``start``."""
    cut = x[0, :, start : start + n * length]
    return cut.unflatten(1, (n, length)).transpose(0, 1)


# A name without a mask function makes transformers build no mask at all.
AttentionInterface.register(ATTENTION, _attention)
