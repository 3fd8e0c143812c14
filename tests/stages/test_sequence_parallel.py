"""Rows cut in slices, and heads shared out: the arithmetic of it, without any rank.

That ranks which share a row compute what one does is in ``test_invariance.py``.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from stages.packed import pack
from stages.sequence_parallel import SequenceRanks, divisible_heads

CPU = torch.device("cpu")
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "activation_bytes.py"
SEQUENCES = [([5, 6, 7], [8, 9]), ([4], [3]), ([9, 8], []), ([1, 2, 3, 4, 5], [6, 7, 8, 9])]


@pytest.mark.parametrize("size", [2, 3, 4, 7, 40])
def test_slices_of_a_row_are_of_one_size_and_join_to_it(size):
    whole = pack(SEQUENCES, CPU)
    slices = [pack(SEQUENCES, CPU, SequenceRanks(None, rank, size)) for rank in range(size)]
    num = whole.input_ids.shape[1]
    t = slices[0].input_ids.shape[1]
    assert {part.input_ids.shape for part in slices} == {(1, t)}
    assert 0 <= t * size - num < size
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([getattr(part, name) for part in slices], dim=1)
        assert joined[:, :num].equal(getattr(whole, name))
    assert torch.cat([part.targets_n for part in slices]).equal(whole.targets_n)
    places = [part.sources_n + rank * t for rank, part in enumerate(slices)]
    assert torch.cat(places).equal(whole.sources_n)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 40])
def test_every_slice_knows_the_segments_of_the_whole_row(size):
    whole = pack(SEQUENCES, CPU)
    part = pack(SEQUENCES, CPU, SequenceRanks(None, size - 1, size))
    assert part.lengths[: len(SEQUENCES)] == whole.lengths
    assert sum(part.lengths) == part.boundaries[-1] == size * part.input_ids.shape[1]
    assert sum(part.counts) == len(whole.targets_n)
    assert part.counts[-1] == len(part.targets_n)


@pytest.mark.parametrize(
    ("heads", "kv", "size", "kept"),
    [
        (8, 8, 4, (8, 8)),
        (8, 4, 4, (8, 4)),
        (8, 2, 4, (8, 4)),  # fewer key/value heads than ranks
        (8, 1, 8, (8, 8)),
        (9, 3, 3, (9, 3)),
        (9, 3, 2, (10, 10)),  # no head count divides
        (14, 2, 4, (16, 16)),
        (12, 3, 4, (12, 12)),  # the queries' does
    ],
)
def test_heads_made_divisible_give_each_rank_the_attention_of_its_own(heads, kv, size, kept):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 5, 4, dtype=torch.float64) for n in (heads, kv, kv))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    made = divisible_heads(q, k, v, size)
    assert tuple(x.shape[1] for x in made[:2]) == kept
    ranks = zip(*(x.chunk(size, dim=1) for x in made), strict=True)
    parts = [scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in ranks]
    torch.testing.assert_close(torch.cat(parts, dim=1)[:, :heads], expected)


@pytest.mark.slow
def test_activations_of_four_ranks_that_share_a_sequence_are_a_third_at_most():
    command = [sys.executable, str(BENCHMARK), "--tokens", "2048", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    rows = json.loads(done.stdout)
    assert {row["sp"] for row in rows} == {1, 4}
    assert all(row["ratio"] < 0.35 for row in rows if row["sp"] == 4)
    # What a loss keeps for each token of the row is on all ranks.
    assert all(row["ratio"] > 0.25 for row in rows if row["sp"] == 4)
