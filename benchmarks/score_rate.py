"""What the score stage costs beside calling the reward in a loop, and how it scales.

    PYTHONPATH=. python benchmarks/score_rate.py [--samples 8192] [--rounds 5] [--folder /dev/shm]

Overhead: the whole stage (Ray worker, reward process, reading, writing, digests, commit) over a
plain loop of the same function on the same rows, in turn; a function of no cost shows it bare, a
sum over digits of about a millisecond shows it in proportion. Rate: samples a minute through the
built-in ``math`` with 1 and 2 workers, on answers that no shortcut of plain numbers takes.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import psutil
import pyarrow as pa

from artifacts import schemas
from artifacts.manifests import Ref
from artifacts.shards import write_shard
from artifacts.store import Store
from stages.contract import Committed, Product, Work, find_or_make
from stages.ray_cluster import RayCluster
from stages.score import run as stage
from stages.score.config import RewardSpec, ScoreConfig
from stages.score.order import ShardOrder
from stages.score.rewards import load_reward, reward_arguments, reward_digests
from stages.score.scorers import Scorers
from stages.score.worker import ScorerSpec, ScoreWorker
from stages.workers import Placement

PER_SHARD = 256
# Where stores lie; None: the system's temporary folder.
FOLDER: str | None = None
SOURCE = """
def free(text, **row):
    return float(len(text))


def millisecond(text, **row):
    return float(sum(int(digit) for _ in range(40) for digit in "0123456789" * 25))
"""


def root(number: int) -> str:
    return rf"\sqrt{{{2 + number}}}"


def make_rows(count: int, first: int = 0) -> list[dict]:
    """Rollout rows with answers in LaTeX, every other one right.

    As in training, a group of 8 has a truth of its own, and no two wrong answers are the same.
    Rows of another ``first`` have others still, so that none was parsed before.
    """

    def answer(number: int) -> str:
        return root(first + (count + number if number % 2 else number // 8))

    return [
        {
            "sample_id": f"{n:07d}",
            "group_id": f"{n // 8:07d}",
            "source": "sums",
            "prompt_ids": [1] * 40,
            "response_ids": [2] * 120,
            "logprobs": [-1.0] * 120,
            "loss_mask": [1] * 120,
            "finish_reason": "stop",
            "text": "Working it out step by step. " * 10 + rf"So \boxed{{{answer(n)}}}",
            "prompt_text": "What is it? " * 4,
            "ground_truth": root(first + n // 8),
            "extra": json.dumps({"level": n % 5}),
        }
        for n in range(count)
    ]


def commit_rollout(store: Store, rows: Sequence[dict]) -> Committed:
    """``rows`` as a rollout."""
    work = Work("rollouts", "rollout", 1, 1, {}, {"policy": Ref("model", "0" * 64)})

    def make() -> Product:
        parts = [rows[i : i + PER_SHARD] for i in range(0, len(rows), PER_SHARD)]
        tables = [pa.Table.from_pylist(part, schema=schemas.ROLLOUTS) for part in parts]
        return Product([write_shard(store, work.folder, i, t) for i, t in enumerate(tables)])

    return find_or_make(store, work, make)


def loop_seconds(spec: RewardSpec, rows: Sequence[dict]) -> float:
    """Seconds of calling the function on every row, and nothing else."""
    function = load_reward(spec).function
    arguments = [reward_arguments({**row, "num_tokens": 120}) for row in rows]
    start = time.perf_counter()
    for keywords in arguments:
        function(**keywords)
    return time.perf_counter() - start


def stage_seconds(scorers: Scorers, config: ScoreConfig, rows: Sequence[dict]) -> float:
    """Seconds of the stage on a fresh store, with workers that are warm."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        store = Store(folder)
        rollout = commit_rollout(store, rows)
        work = stage.score_work(1, config, reward_digests(config.rewards), rollout, None)
        start = time.perf_counter()
        stage.run(store, work, rollout, config, lambda: scorers, lambda **_: None)
        return time.perf_counter() - start


def measured(cluster: RayCluster, spec: RewardSpec, workers: int) -> Callable[..., float]:
    """A warm pool's ``stage_seconds``, by rows."""
    config = ScoreConfig(rewards=[spec])
    scorers = Scorers(cluster, ScorerSpec(config.rewards, None, "", workers, False), Placement(), 0)
    stage_seconds(scorers, config, make_rows(4 * PER_SHARD))

    def measure(rows: Sequence[dict]) -> float:
        return stage_seconds(scorers, config, rows)

    return measure


def print_overhead(cluster: RayCluster, spec: RewardSpec, count: int, rounds: int) -> None:
    """Stage over loop for one function, one worker."""
    rows = make_rows(count)
    run = measured(cluster, spec, 1)
    pairs = [(loop_seconds(spec, rows), run(rows)) for _ in range(rounds)]
    extra = [1e6 * (whole - loop) / count for loop, whole in pairs]
    ratios = [whole / loop for loop, whole in pairs]
    print(
        f"{spec.column:<12} loop {1e6 * median(loop for loop, _ in pairs) / count:8.1f} µs/sample"
        f"  stage over loop {median(ratios):6.2f}  added {median(extra):6.1f} µs/sample"
        f" ({min(extra):.1f} to {max(extra):.1f})"
    )


def print_processor_time(spec: RewardSpec, count: int) -> None:
    """Processor time a sample of worker and reward process, which a busy machine changes little."""
    worker = ScoreWorker("bench", ScorerSpec([spec], None, "", 1, False))
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        store = Store(folder)
        rollout = commit_rollout(store, make_rows(count))
        orders = [ShardOrder(n, shard) for n, shard in enumerate(rollout.manifest.shards)]
        spent = []
        for _ in range(2):  # the first is to warm up
            (child,) = psutil.Process().children()
            before = [sum(p.cpu_times()[:2]) for p in (psutil.Process(), child)]
            for order in orders:
                list(worker.score(store, rollout.folder, "out", order))
            after = [sum(p.cpu_times()[:2]) for p in (psutil.Process(), child)]
            spent = [1e6 * (b - a) / count for a, b in zip(before, after, strict=True)]
    worker.close()
    print(
        f"{spec.column:<12} processor time: worker {spent[0]:.1f}, reward {spent[1]:.1f} µs/sample"
    )


def print_scaling(cluster: RayCluster, count: int, rounds: int) -> None:
    """Samples a minute through ``math``, 1 and 2 workers in turn."""
    spec = RewardSpec(fn="math")
    runs = {workers: measured(cluster, spec, workers) for workers in (1, 2)}
    seconds = [
        {workers: run(make_rows(count, 2 * count * number)) for workers, run in runs.items()}
        for number in range(1, rounds + 1)
    ]
    for workers in runs:
        rate = 60 * count / median(pair[workers] for pair in seconds)
        print(f"math, {workers} workers  {rate:10,.0f} samples/minute")
    ratios = [pair[1] / pair[2] for pair in seconds]
    print(f"math, 2 workers over 1  {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="of the stores; /dev/shm leaves the disk's syncs out")
    options = parser.parse_args()
    global FOLDER
    FOLDER = options.folder
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rewards.py")
        path.write_text(SOURCE)
        print_processor_time(RewardSpec(fn=f"{path}:free"), 4 * options.samples)
        cluster = RayCluster(None)
        print_overhead(cluster, RewardSpec(fn=f"{path}:free"), options.samples, options.rounds)
        few = options.samples // 8
        print_overhead(cluster, RewardSpec(fn=f"{path}:millisecond"), few, options.rounds)
        print_scaling(cluster, few, options.rounds)
        cluster.shutdown()


if __name__ == "__main__":
    main()
