"""Seconds a step of TRL's GRPOTrainer on the `arithmetic` example, same sizes and rewards.

    pip install --no-deps -r requirements/benchmarks.lock
    python benchmarks/trl_step.py --steps 6

TRL generates with transformers here: its vLLM path can't sync weights into a CPU engine. Passive
OpenMP waiting, which makes it three times faster on shared cores, is set for it as for us.
"""

import argparse
import importlib.util
import json
import os
import resource
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_DISABLED", "true")


def load_rewards(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("arithmetic_rewards", path)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reward_function(path: str) -> Any:
    """Both rewards of the example, as one function in TRL's shape."""
    module = load_rewards(path)

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [
            module.correct(text=t, ground_truth=a) + 0.2 * module.formatted(text=t, ground_truth=a)
            for t, a in zip(texts, answer, strict=True)
        ]

    return reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--example", default="examples/arithmetic")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=48)
    args = parser.parse_args()

    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    text = Path(args.example, "data/train.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    config = GRPOConfig(
        output_dir="/tmp/trl-step",
        per_device_train_batch_size=args.prompts * args.samples,
        num_generations=args.samples,
        max_completion_length=args.new_tokens,
        max_steps=args.steps,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=0.8,
        bf16=True,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        model_init_kwargs={"dtype": torch.float32},
    )
    trainer = GRPOTrainer(
        model=str(Path(args.example, "model").resolve()),
        reward_funcs=reward_function(f"{args.example}/rewards.py"),
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print("seconds a step:", [round(s, 1) for s in seconds])
    print(f"median after the first: {median(seconds[1:]):.1f} s; peak memory {peak:.1f} GiB")


if __name__ == "__main__":
    main()
