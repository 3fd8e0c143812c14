"""A rollout's statistics, taken shard by shard, against a plain loop over its rows."""

import math
from pathlib import Path

import pyarrow as pa

from artifacts import schemas
from artifacts.shards import read_table, write_shard
from artifacts.store import Store
from handmade import commit_iteration
from stages.rollout.run import rollout_metrics


def test_rollout_metrics_over_shards_are_those_of_all_rows(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    rollout, _ = commit_iteration(store, 1)
    rows = read_table(store, rollout.folder, rollout.manifest).to_pylist()
    for n, row in enumerate(rows):
        row["finish_reason"] = "stop" if n % 3 else "length"
    parts = [rows[:5], rows[5:6], rows[6:]]
    shards = [
        write_shard(store, "r", n, pa.Table.from_pylist(part, schema=schemas.ROLLOUTS))
        for n, part in enumerate(parts)
    ]
    found = rollout_metrics(store, "r", shards)
    lengths = [len(row["response_ids"]) for row in rows]
    mean_logprob = math.fsum(p for row in rows for p in row["logprobs"]) / sum(lengths)
    assert abs(found.pop("rollout/sampled_logprob_mean") - mean_logprob) < 1e-12
    assert found == {
        "rollout/samples": len(rows),
        "rollout/prompt_tokens": sum(len(row["prompt_ids"]) for row in rows),
        "rollout/response_tokens": sum(lengths),
        "rollout/response_length_mean": sum(lengths) / len(rows),
        "rollout/response_length_max": max(lengths),
        "rollout/truncated_share": sum(n % 3 == 0 for n in range(len(rows))) / len(rows),
    }
