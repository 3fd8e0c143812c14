"""Runs killed at random, until so many kills have hit: what they cost, and that nothing is lost.

    python benchmarks/kills.py --kills 200

Each run is small and real (Prefect, MLflow, Ray, an engine, FSDP on two ranks). A kill is SIGKILL
to its driver, an engine, a score worker or a trainer rank, at a random moment. Then it is resumed.
In the end its manifests' digests and its sample ids are held against an undisturbed run's.

The last lines compare the wait from a kill to the next new shard with that of a cold start.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "e2e")]

import psutil  # noqa: E402  (after the path)
import yaml  # noqa: E402

import tiny  # noqa: E402
from kills import Disturbed, Disturber, sample_ids  # noqa: E402
from launching import REWARDS, Bench, digests, kill_tree, wait_until  # noqa: E402

CONFIG = {
    "run": "quiet",
    "model": "model",
    "iterations": 3,
    "data": {"path": "data.jsonl", "template": "plain", "batch_size": 8},
    "rollout": {
        "samples_per_prompt": 4,
        "max_new_tokens": 24,
        "dtype": "float32",
        "prompts_per_shard": 1,
        "max_sequences": 8,
    },
    "score": {"rewards": [{"fn": "rewards.py:digits"}, {"fn": "rewards.py:short"}]},
    "update": {"lr": 1e-3, "dtype": "float32", "minibatches": 2, "kl_coef": 0.01},
    "checkpoint": {"every": 2},
    "resources": {"update": {"ranks": 2}, "rollout": {"threads": 1}},
    "retries": {"delay_seconds": 0.1},
}


def make_bench(folder: Path, engine: str) -> Bench:
    """A folder with all that a run needs, and no Prefect server but the run's own."""
    tiny.save_model(folder / "model")
    tiny.save_prompts(folder / "data.jsonl")
    (folder / "rewards.py").write_text(REWARDS)
    config = {**CONFIG, "rollout": {**CONFIG["rollout"], "engine": engine}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return Bench(folder, {**os.environ, "PREFECT_HOME": str(folder / "prefect")})


def disturb(bench: Bench, kills: int, per_run: int, seed: int, seconds: float) -> list[Disturbed]:
    """Disturbed runs until ``kills`` kills have hit; each is checked, and told of as it ends."""
    found: list[Disturbed] = []
    whole = bench.url("quiet")
    while (hits := sum(len(run.kills) for run in found)) < kills:
        number = len(found)
        asked = min(per_run, kills - hits)
        run = Disturber(bench, f"run-{number:03d}", seed + number, seconds).disturb(asked)
        url = bench.url(run.run)
        assert digests(url) == digests(whole), f"other bytes: {run}"
        assert sample_ids(url) == sample_ids(whole), f"other samples: {run}"
        assert not run.rewritten, f"written twice: {run}"
        found.append(run)
        names = ", ".join(f"{name} at {moment:.1f} s" for name, moment in run.kills)
        told = f"{run.run}: equal after {run.starts} starts, {run.seconds:.0f} s; {names}"
        print(told, flush=True)
    return found


def print_table(found: list[Disturbed], seconds: float) -> None:
    """What the kills came to."""
    roles = Counter(name for run in found for name, _ in run.kills)
    hits = sum(roles.values())
    extra = sum(run.seconds for run in found) - seconds * len(found)
    print(f"\n{'kills':28}{hits}")
    for name, count in sorted(roles.items()):
        print(f"  {name:26}{count}")
    print(f"{'runs, all equal':28}{len(found)}")
    print(f"{'committed files rewritten':28}{sum(len(run.rewritten) for run in found)}")
    print(f"{'shards left as orphans':28}{sum(run.orphans for run in found)}")
    print(f"{'an undisturbed run':28}{seconds:.1f} s")
    print(f"{'wasted a kill':28}{extra / max(hits, 1):.1f} s")


def first_shard(bench: Bench, run: str, iteration: int, *command: str) -> tuple[float, object]:
    """Seconds from a launch to the first new rollout shard of ``iteration``, and the process."""
    url = bench.url(run)
    pattern = f"iteration-{iteration:06d}/rollout/*/shard-*"
    before = set(url.glob(pattern))
    start = time.monotonic()
    process = bench.launch(*command)
    wait_until(lambda: set(url.glob(pattern)) - before, 300)
    return time.monotonic() - start, process


def measure_recovery(bench: Bench, rounds: int) -> None:
    """Cold start to first shard, and kill to next shard, in turn."""
    cold, warm = [], []
    for number in range(rounds):
        run = f"recovery-{number}"
        seconds, process = first_shard(bench, run, 1, "train", "run.yaml", "--run", run)
        cold.append(seconds)
        url = bench.url(run)
        wait_until(lambda: list(url.glob("iteration-000002/rollout/*/shard-*")), 300)  # noqa: B023
        workers = kill_tree(process)
        start = time.monotonic()
        process.wait()
        psutil.wait_procs(workers, timeout=60)
        _, process = first_shard(bench, run, 2, "resume", f"runs/{run}")
        warm.append(time.monotonic() - start)
        process.wait()
    before, after = statistics.median(cold), statistics.median(warm)
    print(f"\n{'cold start to first shard':28}{before:.1f} s")
    print(f"{'kill to next shard':28}{after:.1f} s")
    print(f"{'ratio':28}{after / before:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--per-run", type=int, default=5, help="kills of one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("vllm", "hf"), default="hf")
    parser.add_argument("--recovery-rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bench = make_bench(Path(name), args.engine)
        bench.cli("train", "run.yaml")
        # Again, for its time: the first one made the databases, and kills are to come before
        # a run is over.
        start = time.monotonic()
        bench.cli("train", "run.yaml", "--run", "quiet-again")
        seconds = time.monotonic() - start
        assert digests(bench.url("quiet-again")) == digests(bench.url("quiet"))
        if args.kills:
            found = disturb(bench, args.kills, args.per_run, args.seed, seconds)
            print_table(found, seconds)
        if args.recovery_rounds:
            measure_recovery(bench, args.recovery_rounds)


if __name__ == "__main__":
    main()
