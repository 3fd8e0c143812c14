"""An iteration's rollouts larger than memory, written and read shard by shard; peak memory.

    python benchmarks/store_scale.py --rows 1000000

A child process writes ROWS rollouts of 200 response tokens with ``write_shard``, takes the rollout
stage's own metrics over them, and reads every column back with ``read_shards``. Each shard has the
tokens of one drawn at the start under ids of its own: what is measured is the store, not the
drawing. Peak is the child's largest resident size, Python and pyarrow (about 0.1 GB) included.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time

import numpy as np
import pyarrow as pa

from artifacts import schemas
from artifacts.manifests import Shard
from artifacts.shards import read_shards, write_shard
from artifacts.store import Store
from stages.rollout.run import rollout_metrics

TOKENS, PROMPT_TOKENS, SAMPLES, SHARD_ROWS = 200, 60, 8, 4096
FOLDER = "iteration-000001/rollout/k"


def drawn_shard(rng: np.random.Generator) -> pa.Table:
    """A shard of rollouts: tokens by rank like a text's, log-probs of any size, words for text."""
    count = SHARD_ROWS * TOKENS
    tokens = np.minimum(rng.zipf(1.3, count), 49151).astype(np.int32)
    prompts = np.minimum(rng.zipf(1.3, SHARD_ROWS * PROMPT_TOKENS), 49151).astype(np.int32)
    texts = [
        " ".join(map(str, tokens[row * TOKENS : row * TOKENS + TOKENS // 2]))
        for row in range(SHARD_ROWS)
    ]
    constants = {
        "epoch": 0,
        "finish_reason": "stop",
        "prompt_text": "",
        "ground_truth": "1",
        "extra": "{}",
        "policy_version": 0,
        "policy_digest": "0" * 64,
    }
    columns = {name: pa.nulls(SHARD_ROWS, schemas.ROLLOUTS.field(name).type) for name in names()}
    columns |= {name: pa.repeat(value, SHARD_ROWS) for name, value in constants.items()}
    columns |= {
        "prompt_ids": lists_of(prompts, PROMPT_TOKENS),
        "response_ids": lists_of(tokens, TOKENS),
        "logprobs": lists_of(-rng.exponential(0.7, count).astype(np.float32), TOKENS),
        "loss_mask": lists_of(np.ones(count, np.int8), TOKENS),
        "text": pa.array(texts),
    }
    return pa.Table.from_pydict(columns).select(names()).cast(schemas.ROLLOUTS)


def names() -> list[str]:
    """The columns of a rollout."""
    return list(schemas.ROLLOUTS.names)


def lists_of(values: np.ndarray, length: int) -> pa.Array:
    """``values`` in lists of ``length``."""
    offsets = np.arange(0, len(values) + 1, length, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def named(drawn: pa.Table, index: int) -> pa.Table:
    """``drawn`` as shard ``index``: with its own ids and seeds."""
    numbers = range(index * SHARD_ROWS, (index + 1) * SHARD_ROWS)
    own = {
        "sample_id": pa.array(f"000001-{n // SAMPLES:06d}-{n % SAMPLES:03d}" for n in numbers),
        "group_id": pa.array(f"000001-{n // SAMPLES:06d}" for n in numbers),
        "row": pa.array([n // SAMPLES for n in numbers], pa.int64()),
        "sample_index": pa.array([n % SAMPLES for n in numbers], pa.int32()),
        "seed": pa.array([n * 2654435761 % 2**62 for n in numbers], pa.int64()),
    }
    for name, column in own.items():
        place = drawn.schema.get_field_index(name)
        drawn = drawn.set_column(place, drawn.schema.field(name), column)
    return drawn


def measure(store: Store, rows: int) -> dict[str, float]:
    """Write, take metrics, read back: seconds of each, bytes, peak resident bytes."""
    drawn = drawn_shard(np.random.default_rng(0))
    marks = [time.perf_counter()]
    shards: list[Shard] = []
    for index in range(-(-rows // SHARD_ROWS)):
        table = named(drawn, index).slice(0, rows - index * SHARD_ROWS)
        shards.append(write_shard(store, FOLDER, index, table))
    marks.append(time.perf_counter())
    metrics = rollout_metrics(store, FOLDER, shards)
    marks.append(time.perf_counter())
    found = tokens = 0
    for table in read_shards(store, FOLDER, shards):
        found += table.num_rows
        tokens += len(table["response_ids"].combine_chunks().flatten())
    marks.append(time.perf_counter())
    if (found, tokens) != (rows, metrics["rollout/response_tokens"]) or tokens != rows * TOKENS:
        raise RuntimeError(f"{found} rows and {tokens} tokens came back of {rows} rows")
    write, measured, read = np.diff(marks).tolist()
    return {
        "write_seconds": write,
        "metrics_seconds": measured,
        "read_seconds": read,
        "bytes": sum(shard.bytes for shard in shards),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def measured_in_child(url: str, rows: int) -> dict[str, float]:
    """What :func:`measure` gives in a process of its own."""
    command = [sys.executable, __file__, "--rows", str(rows), "--child", url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--folder", help="where to write; default: the temporary folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(Store(args.child), args.rows[0])))
        return
    print(
        "| rows | GB on disk | write s | metrics s | read s | peak GB |\n|---|---|---|---|---|---|"
    )
    for rows in args.rows:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            made = measured_in_child(folder, rows)
        seconds = " | ".join(
            f"{made[f'{part}_seconds']:.1f}" for part in ("write", "metrics", "read")
        )
        sizes = made["bytes"] / 1e9, made["peak_bytes"] / 1e9
        print(f"| {rows:,} | {sizes[0]:.2f} | {seconds} | {sizes[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
