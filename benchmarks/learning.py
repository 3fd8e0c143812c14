"""Every algorithm on the `sort` task over several seeds: does it learn, by how much, how long.

    python benchmarks/learning.py --jobs 2 --engine vllm
    python benchmarks/learning.py --algorithms grpo,ppo --seeds 0 --iterations 10 --engine hf
    python benchmarks/learning.py --plot-only runs/learning

Each run is a `ratchet train` in a process of its own, with a Prefect home and an MLflow file of its
own, on one CPU thread. Before and after it, greedy accuracy on held-out rows is measured by
transformers alone. A run that is finished in --out is not repeated; one that is not begins anew.
--out gets learning.csv, learning-summary.csv, learning.md, and learning.png where matplotlib is.

A run has learned when both have risen by MARGIN: the mean reward of its last iterations over that
of the first, and held-out accuracy. The status is 1, and the runs are named, where one has not, or
failed; the end of a failed run's log is shown. Needs nothing installed but the libraries.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "sort")]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])])
os.environ["OMP_NUM_THREADS"] = "1"  # runs lie side by side, and no operation here is large

from flows.environment import set_defaults  # noqa: E402
from learning_tables import Result, draw_plot, not_learned, write_tables  # noqa: E402

set_defaults()

ITERATIONS = 30
COMMON: dict[str, Any] = {
    "data": {"prompt": "prompt", "answer": "answer", "template": "plain", "batch_size": 16},
    "rollout": {
        "samples_per_prompt": 8,
        # Six digits and the end token; a fifth of the limit is left for DAPO's length penalty.
        "max_new_tokens": 9,
        "temperature": 1.0,
        "dtype": "float32",
        "prompts_per_shard": 16,
        "gpu_memory": 0.1,
    },
    "score": {"rewards": [{"fn": f"{ROOT}/examples/sort/rewards.py:exact"}]},
    "update": {
        # What a policy of 0.3 M parameters takes, and a preset sets none. At 5e-4 the policy
        # rises for four iterations and falls again, with every algorithm that was tried.
        "lr": 2e-4,
        "lr_warmup_steps": 10,
        "betas": [0.9, 0.95],
        # Two steps an iteration: in the second, ratios are not 1, so clips and gates have a part.
        "minibatches": 2,
        "dtype": "float32",
    },
    "resources": {
        "rollout": {"threads": 1},
        "score": {"workers": 1, "threads": 1},
        "update": {"threads": 1},
    },
    "tracking": {"samples": 0},
    "retries": {"attempts": 0},
}
# What an algorithm needs beside COMMON, section by section, each with its reason.
ALGORITHMS: dict[str, dict[str, dict[str, Any]]] = {
    "grpo": {},
    "dr_grpo": {},
    # Dynamic sampling is a part of DAPO that the preset can't set: it is a field of rollout.
    "dapo": {"rollout": {"max_rounds": 2}},
    "gspo": {},
    "cispo": {},
    "gmpo": {},
    "sapo": {},
    "rloo": {},
    "reinforce_pp": {},
    "reinforce_pp_baseline": {},
    "opo": {},
    "gdpo": {},
    # The critic's default of 1e-5 is for large models: here its head would stay near zero.
    "ppo": {"update": {"critic": {"lr": 1e-3}}},
    "dpo": {},
    "ipo": {},
    # Not a preset, but a field of the update.
    "maxrl": {"update": {"algorithm": "grpo", "advantage": "maxrl"}},
}
LOG_LINES = 40


@dataclass(frozen=True)
class Run:
    """One training: what, on which seed, and where it lies."""

    algorithm: str
    seed: int
    iterations: int
    engine: str
    is_debug: bool
    out: Path

    @property
    def name(self) -> str:
        return f"{self.algorithm}-seed-{self.seed}"

    @property
    def folder(self) -> Path:
        return self.out / "runs" / self.name

    @property
    def prepared(self) -> Path:
        """The warm start and the data of the seed."""
        return self.out / f"seed-{self.seed}"

    def config(self) -> dict[str, Any]:
        """The whole configuration, as a YAML file holds it; JSON is YAML."""
        own = ALGORITHMS[self.algorithm]
        sections = {name: values | own.get(name, {}) for name, values in COMMON.items()}
        sections["data"]["path"] = str(self.prepared / "data" / "train.jsonl")
        sections["rollout"]["engine"] = self.engine
        sections["update"] = {"algorithm": self.algorithm} | sections["update"]
        return {
            "run": "run",
            "store": str(self.folder / "store"),
            "model": str(self.prepared / "model"),
            "seed": self.seed,
            "iterations": self.iterations,
            "checkpoint": {"every": self.iterations},
            **sections,
        }


class RunFailedError(Exception):
    """A training ended with another status than 0; the message holds the end of its log."""


def prepare_seed(out: Path, seed: int) -> float:
    """Make the seed's warm start and data. Returns its greedy accuracy on held-out rows."""
    script = ROOT / "examples" / "sort" / "prepare.py"
    command = [sys.executable, str(script), "--seed", str(seed), "--to", str(out / f"seed-{seed}")]
    subprocess.run(command, check=True)
    return heldout_accuracy(out / f"seed-{seed}" / "model", out, seed)


def heldout_accuracy(model: Path, out: Path, seed: int) -> float:
    """Share of held-out rows whose greedy response is the answer and nothing else."""
    import torch
    from evaluate import accuracy

    torch.set_num_threads(1)
    return accuracy(model, out / f"seed-{seed}" / "data" / "heldout.jsonl")


def finished(run: Run) -> Result | None:
    """What ``run`` came to, where it is finished already.

    Raises:
        ValueError: it was made with other settings.
    """
    path = run.folder / "result.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    if record["config"] != run.config():
        raise ValueError(
            f"{run.folder} was made with other settings: take another --out, or remove it"
        )
    return Result(**record["result"])


def train(run: Run, databases: Path, start: float, lock: threading.Lock) -> Result:
    """Run it from its beginning, and measure it.

    Args:
        databases: see :func:`make_databases`; the run gets a copy.
        start: held-out accuracy of the warm start.
        lock: held while this process itself computes.

    Raises:
        RunFailedError: it ended with another status than 0.
    """
    shutil.rmtree(run.folder, ignore_errors=True)
    shutil.copytree(databases / "prefect", run.folder / "prefect")
    (run.folder / "store").mkdir()
    shutil.copy(databases / "mlflow.db", run.folder / "store" / "mlflow.db")
    path = run.folder / "run.yaml"
    path.write_text(json.dumps(run.config(), indent=1))
    seconds = _train(run, path)
    with lock:
        end = _accuracy_of_run(run, path)
        rewards, times = _iterations(run)
    result = Result(run.algorithm, run.seed, start, end, rewards, times, seconds)
    record = {"config": run.config(), "result": asdict(result)}
    whole = run.folder / "result.json.tmp"
    whole.write_text(json.dumps(record))
    whole.rename(run.folder / "result.json")
    return result


def _train(run: Run, config: Path) -> float:
    """Seconds of the whole process."""
    words = ["train", str(config), *(["--debug"] if run.is_debug else [])]
    environment = {**os.environ, "PREFECT_HOME": str(run.folder / "prefect")}
    log = run.folder / "train.log"
    began = time.monotonic()
    with log.open("w") as file:
        status = subprocess.run(
            ratchet(*words), env=environment, stdout=file, stderr=subprocess.STDOUT
        ).returncode
    if status:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise RunFailedError(f"{run.name} ended with status {status}; the end of {log}:\n{tail}")
    return time.monotonic() - began


def ratchet(*words: str) -> list[str]:
    """The command line, whether the project is installed or not."""
    return [
        sys.executable,
        "-c",
        "import sys; from flows.cli import main; sys.exit(main())",
        *words,
    ]


def _accuracy_of_run(run: Run, config: Path) -> float:
    from flows.config import load_config
    from flows.export import export_policy

    policy = run.folder / "policy"
    export_policy(load_config(str(config)), str(policy), None, debug=True)
    return heldout_accuracy(policy, run.out, run.seed)


def _iterations(run: Run) -> tuple[list[float], list[float]]:
    """Mean reward and seconds of each iteration, read from what is committed."""
    from artifacts.runs import committed
    from artifacts.store import Store

    store = Store(str(run.folder / "store" / "run"))
    rewards, seconds = [], []
    for iteration in range(1, run.iterations + 1):
        stages = {n: committed(store, iteration, n) for n in ("rollout", "score", "update")}
        scores = [manifest for _, manifest in stages["score"]]
        samples = sum(scored.rows for scored in scores)
        rewards.append(sum(s.metrics["reward/mean"] * s.rows for s in scores) / samples)
        made = [manifest.provenance for found in stages.values() for _, manifest in found]
        began = min(provenance["start"] for provenance in made)
        seconds.append(max(p["start"] + p["seconds"] for p in made) - began)
    return rewards, seconds


def make_databases(out: Path) -> Path:
    """A folder with a Prefect home and an MLflow file whose tables are made.

    Making them takes longer than the iterations of a small run, and each run needs its own.
    """
    folder = out / "databases"
    if not folder.exists():
        fresh = out / "databases.tmp"
        shutil.rmtree(fresh, ignore_errors=True)
        (fresh / "prefect").mkdir(parents=True)
        environment = {**os.environ, "PREFECT_HOME": str(fresh / "prefect")}
        prefect = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
        subprocess.run(prefect, check=True, env=environment, stdout=subprocess.DEVNULL)
        code = "import sys, mlflow; mlflow.MlflowClient(sys.argv[1]).search_experiments()"
        uri = f"sqlite:///{fresh / 'mlflow.db'}"
        subprocess.run([sys.executable, "-c", code, uri], check=True, stderr=subprocess.DEVNULL)
        fresh.rename(folder)
    return folder


def run_all(runs: Sequence[Run], jobs: int) -> tuple[list[Result], list[str]]:
    """What each finished run came to, and the names of those that failed."""
    out = runs[0].out
    databases = make_databases(out)
    starts = {seed: prepare_seed(out, seed) for seed in dict.fromkeys(run.seed for run in runs)}
    found = {run: finished(run) for run in runs}
    missing = [run for run, result in found.items() if result is None]
    failed, lock = [], threading.Lock()
    with ThreadPoolExecutor(jobs) as pool:
        futures = {
            pool.submit(train, run, databases, starts[run.seed], lock): run for run in missing
        }
        for future in as_completed(futures):
            run = futures[future]
            try:
                found[run] = future.result()
            except RunFailedError as error:
                failed.append(run.name)
                print(error, flush=True)
            else:
                print(f"{run.name}: {found[run]}", flush=True)
    return [result for result in found.values() if result is not None], failed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), metavar="A,B")
    parser.add_argument("--seeds", default="0,1,2", metavar="N,M")
    parser.add_argument("--jobs", type=int, default=1, help="whole runs side by side")
    parser.add_argument("--engine", choices=("vllm", "hf"), default="vllm")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--debug", action="store_true", help="no Ray: a run is one process")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--plot-only", type=Path, metavar="DIR", help="draw DIR/learning.csv")
    arguments = parser.parse_args()
    unknown = set(arguments.algorithms.split(",")) - ALGORITHMS.keys()
    if unknown:
        parser.error(f"no settings for {', '.join(sorted(unknown))}: there are {[*ALGORITHMS]}")
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.plot_only:
        draw_plot(arguments.plot_only)
        return
    out = arguments.out.resolve()
    runs = [
        Run(name, int(seed), arguments.iterations, arguments.engine, arguments.debug, out)
        for name in arguments.algorithms.split(",")
        for seed in arguments.seeds.split(",")
    ]
    results, failed = run_all(runs, arguments.jobs)
    if results:
        print(write_tables(out, results))
    lines = [f"{name} failed" for name in failed] + not_learned(results)
    sys.exit("\n".join(lines) or None)


if __name__ == "__main__":
    main()
