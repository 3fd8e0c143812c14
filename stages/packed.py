"""Sequences packed end to end in one row, each attending to itself alone.

Shapes: T tokens in the row, N response tokens in it, H heads, D head width.

Any transformers decoder is served through its attention interface: the model is made with
``attn_implementation=ATTENTION``, and the segments of the row in hand reach the attention function
through a context, so no mask is ever built.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "ratchet_packed"


@dataclass(frozen=True)
class Packed:
    """One packed row.

    Attributes:
        input_ids, position_ids: (1, T); positions count from 0 in each segment.
        lengths: tokens of each segment, in order.
        boundaries: (segments + 1,) int32, where each segment starts, and T.
        sources_N: places in the row that predict a response token.
        targets_N: those response tokens.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...]
    boundaries: torch.Tensor
    sources_N: torch.Tensor
    targets_N: torch.Tensor


def pack(sequences: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> Packed:
    """Pack (prompt ids, response ids) pairs.

    A response's last token predicts nothing that is asked for, so it is left out of the input.
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

    def row(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return Packed(
        row(ids)[None],
        row(positions)[None],
        tuple(b - a for a, b in pairwise(boundaries)),
        torch.tensor(boundaries, dtype=torch.int32, device=device),
        row(sources),
        row(targets),
    )


_segments: Packed | None = None


@contextmanager
def segments_of(batch: Packed) -> Iterator[None]:
    """Attention inside knows the row's segments; backward has to run inside too."""
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
    """(1, H, T, D) queries to (1, T, H, D), causal in each segment."""
    if _segments is None:
        raise RuntimeError("run the model inside segments_of(batch)")
    # Models with such layers are refused by their configuration (stages/attention_layers.py): this
    # is for a family whose configuration doesn't show them.
    is_bounded = sliding_window is not None and sliding_window < max(_segments.lengths)
    if is_bounded or softcap is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError("sliding window, softcap and sinks are not served")
    if dropout:
        raise NotImplementedError("dropout in attention is not served")
    attend = _attend_on_gpu if query.is_cuda else _attend_on_cpu
    return attend(query, key, value, _segments, scaling), None


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
