"""Makes what the `sort` example starts from: a warm policy of 0.3 M parameters, and its data.

The task: put six digits in ascending order, `629143>` to `123469`. The policy is a Llama in a
plain Hugging Face folder, taught for a few seconds with a mixed habit: most targets stand in
descending order, the rest in the right one. So it starts low but not at zero, and what GRPO has
to do is known: turn the habit round. Held-out strings are in neither training set.

    python examples/sort/prepare.py [--seed 0] [--to examples/sort]

torch and transformers load only when there is something to make.
"""

import argparse
import os
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from whole_folder import make_and_report, write_jsonl

NUM_DIGITS = 6
SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = "0123456789> "  # with the specials 16: no padding rows in the embedding


@dataclass(frozen=True)
class Data:
    """What the two JSONL files are a function of."""

    seed: int
    train_rows: int = 2048
    heldout_rows: int = 512


@dataclass(frozen=True)
class WarmUp:
    """What the policy is a function of, beside the data's held-out rows."""

    seed: int
    steps: int = 200
    batch_size: int = 64
    lr: float = 3e-3
    lr_warmup_steps: int = 20
    descending_share: float = 0.62

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, then linear decay to nothing: GRPO must not start from a noisy point."""
        return min(1.0, (step + 1) / self.lr_warmup_steps) * (1 - step / self.steps)


def draw_rows(data: Data) -> tuple[list[dict], list[dict]]:
    """Train and held-out rows, no string of digits twice."""
    num_rows = data.train_rows + data.heldout_rows
    numbers = random.Random(data.seed).sample(range(10**NUM_DIGITS), num_rows)
    rows = [make_row(f"{number:0{NUM_DIGITS}d}") for number in numbers]
    return rows[: data.train_rows], rows[data.train_rows :]


def make_row(digits: str) -> dict:
    return {"prompt": f"{digits}>", "answer": "".join(sorted(digits))}


def make_tokenizer():
    """One token a character; encoding plain text puts <bos> before it, once."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: index for index, token in enumerate([*SPECIALS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", ids["<bos>"])]
    )
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, padding_side="left", **names
    )


def make_model(tokenizer):
    """A Llama of 2 layers, 128 wide, with random weights from torch's global generator."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def draw_text(rng: random.Random, descending_share: float, heldout: set[str]) -> str:
    """A prompt with its target, the target in descending order at the given share."""
    while True:
        row = make_row(f"{rng.randrange(10**NUM_DIGITS):0{NUM_DIGITS}d}")
        if row["prompt"] not in heldout:
            break
    is_descending = rng.random() < descending_share
    return row["prompt"] + (row["answer"][::-1] if is_descending else row["answer"])


def warm_up(model, tokenizer, recipe: WarmUp, heldout: set[str]) -> None:
    """Supervised training in place; the loss is on the target and its <eos> alone."""
    import torch

    rng = random.Random(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.lr_factor)
    for _ in range(recipe.steps):
        texts = [
            draw_text(rng, recipe.descending_share, heldout) + tokenizer.eos_token
            for _ in range(recipe.batch_size)
        ]
        ids = tokenizer(texts, return_tensors="pt")["input_ids"]
        labels = ids.clone()
        labels[:, : -(NUM_DIGITS + 1)] = -100
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def fill_data(folder: Path, data: Data) -> None:
    train, heldout = draw_rows(data)
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "heldout.jsonl", heldout)


def fill_model(folder: Path, recipe: WarmUp, data: Data) -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve shared cores
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)  # nothing to gain from more at this size, and one order of sums
    torch.manual_seed(recipe.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, tokenizer, recipe, {row["prompt"] for row in draw_rows(data)[1]})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare(to: Path, seed: int) -> None:
    """Make `to`/data and `to`/model, where they are not there yet."""
    data, recipe = Data(seed), WarmUp(seed)
    make_and_report(to / "data", asdict(data), lambda folder: fill_data(folder, data))
    settings = asdict(recipe) | {"data": asdict(data)}
    make_and_report(to / "model", settings, lambda folder: fill_model(folder, recipe, data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, default=Path("examples/sort"), metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        prepare(arguments.to, arguments.seed)
    except OSError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
