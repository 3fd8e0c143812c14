"""Writing and reading shard by shard holds a shard, however many there are."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import store_scale

FEW, MANY = 2 * store_scale.SHARD_ROWS, 10 * store_scale.SHARD_ROWS
# The allocator's own ups and downs; eight shards more, held, would be about 95 MB.
TOLERANCE = 32 << 20


def test_peak_memory_of_five_times_the_rows_is_the_same(tmp_path: Path) -> None:
    few, many = (store_scale.measured_in_child(f"{tmp_path}/{n}", n) for n in (FEW, MANY))
    assert many["bytes"] > 4.9 * few["bytes"]
    assert many["peak_bytes"] < few["peak_bytes"] + TOLERANCE
