"""Held-out accuracy of policies on the `sort` task, greedy, by transformers alone.

    python examples/sort/evaluate.py [MODEL ...] [--data heldout.jsonl] [--limit N] [--json]

MODEL is a Hugging Face folder, or a run of Ratchet, of which the newest policy is exported first.
Without one: the warm start and the run that `sort.yaml` makes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

DEFAULT_MODELS = ["examples/sort/model", "runs/sort"]
DEFAULT_DATA = "examples/sort/data/heldout.jsonl"
BATCH_SIZE = 256


def read_rows(data_path: str | Path, limit: int | None = None) -> list[dict]:
    """The first `limit` rows of a JSONL file; all of them for None."""
    rows = [json.loads(line) for line in Path(data_path).read_text().splitlines()]
    return rows[:limit]


def accuracy(model_path: str | Path, data_path: str | Path, limit: int | None = None) -> float:
    """Share of rows, 0.0 to 1.0, whose greedy response is the answer and nothing else."""
    rows = read_rows(data_path, limit)
    if not rows:
        raise ValueError(f"{data_path} has no rows to evaluate on")
    batches = [rows[start : start + BATCH_SIZE] for start in range(0, len(rows), BATCH_SIZE)]
    tokenizer, model = load_policy(model_path)
    return sum(count_right(tokenizer, model, batch) for batch in batches) / len(rows)


def load_policy(model_path: str | Path):
    """Tokenizer and model in float32, from a local folder."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve shared cores
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all that it reads lies here
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return tokenizer, model.eval()


def count_right(tokenizer, model, rows: list[dict]) -> int:
    """How many of one batch's greedy responses are right."""
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    longest = max(len(row["answer"]) for row in rows) + 2  # room for <eos>, and for being too long
    ids = model.generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        max_new_tokens=longest,
        do_sample=False,
    )
    responses = tokenizer.batch_decode(
        ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return sum(text == row["answer"] for text, row in zip(responses, rows, strict=True))


def model_accuracy(model: str, data_path: str, limit: int | None) -> float:
    """`accuracy` of a Hugging Face folder, or of the newest policy of a run."""
    if not Path(model, "run.json").is_file():
        return accuracy(model, data_path, limit)
    with tempfile.TemporaryDirectory() as scratch:
        folder = f"{scratch}/policy"
        ratchet = Path(sys.executable).with_name("ratchet")
        subprocess.run([ratchet, "export", model, "--to", folder], check=True, stdout=sys.stderr)
        return accuracy(folder, data_path, limit)


def print_table(results: dict[str, float], num_rows: int) -> None:
    width = max(len("policy"), *map(len, results))
    print(f"{'policy':<{width}}  accuracy on {num_rows} held-out rows")
    for model, value in results.items():
        print(f"{model:<{width}}  {value:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=DEFAULT_MODELS, metavar="MODEL")
    parser.add_argument("--data", default=DEFAULT_DATA)
    parser.add_argument("--limit", type=int, help="rows to take; default: all")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args()
    for path in [*arguments.models, arguments.data]:
        if not Path(path).exists():
            parser.error(f"{path} does not exist: make it first, or name another")
    num_rows = len(read_rows(arguments.data, arguments.limit))
    results = {
        model: model_accuracy(model, arguments.data, arguments.limit) for model in arguments.models
    }
    if arguments.json:
        print(json.dumps({"rows": num_rows, "accuracy": results}))
    else:
        print_table(results, num_rows)


if __name__ == "__main__":
    main()
