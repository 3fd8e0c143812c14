"""The examples: their data is right, their rewards judge right, their files fit the config."""

import importlib.util
import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch

from flows.config import load_config
from stages.score.rewards import load_reward

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
YAML_FILES = sorted(EXAMPLES.glob("*/*.yaml"))


def load_script(path: str):
    """A script under examples/ as a module; it is no package, and is not run."""
    name = "example_" + path.removesuffix(".py").replace("/", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def sort_data(tmp_path_factory):
    script, folder = load_script("sort/prepare.py"), tmp_path_factory.mktemp("sort")
    script.fill_data(folder, script.Data(seed=3))
    return read_jsonl(folder / "train.jsonl"), read_jsonl(folder / "heldout.jsonl")


@pytest.fixture(scope="module")
def arithmetic_data(tmp_path_factory):
    script, folder = load_script("arithmetic/prepare.py"), tmp_path_factory.mktemp("arithmetic")
    script.fill_data(folder, script.Data(seed=3))
    return read_jsonl(folder / "train.jsonl"), read_jsonl(folder / "heldout.jsonl")


# --- configs


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.stem)
def test_example_config_as_shipped_is_valid_and_under_forty_lines(path):
    config = load_config(str(path))
    assert len(path.read_text().splitlines()) < 40
    for spec in config.score.rewards:
        load_reward(spec.model_copy(update={"fn": f"{ROOT}/{spec.fn}"}))


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.stem)
def test_example_config_with_its_gpu_lines_changes_resources_only(path, tmp_path):
    text = path.read_text()
    gpu_lines = re.findall(r"^#(   \w+: \{.*)$", text, re.MULTILINE)
    assert gpu_lines
    head, _, _ = text.partition("resources:\n")
    (tmp_path / path.name).write_text("\n".join([head + "resources:", *gpu_lines]) + "\n")
    on_cpu, on_gpu = load_config(str(path)), load_config(str(tmp_path / path.name))
    assert on_gpu.resources.update.gpus > 0
    assert on_gpu.model_copy(update={"resources": on_cpu.resources}) == on_cpu


def test_sort_config_over_its_iterations_takes_no_prompt_twice(sort_data):
    config = load_config(str(EXAMPLES / "sort/sort.yaml"))
    assert config.iterations * config.data.batch_size <= len(sort_data[0])


# --- sort


def insertion_sort(digits: str) -> str:
    placed: list[str] = []
    for digit in digits:
        place = 0
        while place < len(placed) and placed[place] <= digit:
            place += 1
        placed.insert(place, digit)
    return "".join(placed)


def test_sort_rows_against_insertion_sort_have_the_right_answer(sort_data):
    for row in [*sort_data[0], *sort_data[1]]:
        assert re.fullmatch(r"\d{6}>", row["prompt"])
        assert row["answer"] == insertion_sort(row["prompt"][:-1])


def test_sort_rows_of_both_files_share_no_prompt(sort_data):
    prompts = [row["prompt"] for rows in sort_data for row in rows]
    assert len(set(prompts)) == len(prompts)


def test_sort_rows_of_one_seed_are_the_same_again_and_of_another_are_not():
    script = load_script("sort/prepare.py")
    assert script.draw_rows(script.Data(1)) == script.draw_rows(script.Data(1))
    assert script.draw_rows(script.Data(1)) != script.draw_rows(script.Data(2))


def test_sort_warm_up_texts_avoid_heldout_and_keep_the_mixed_habit(sort_data):
    script = load_script("sort/prepare.py")
    rng = random.Random(0)
    heldout = {f"{number:06d}>" for number in range(500_000)}
    texts = [script.draw_text(rng, 0.62, heldout).split(">") for _ in range(2000)]
    assert all(int(digits) >= 500_000 for digits, _ in texts)
    descending = [insertion_sort(digits)[::-1] == target for digits, target in texts]
    assert all(
        target in (insertion_sort(digits), insertion_sort(digits)[::-1]) for digits, target in texts
    )
    assert 0.55 < sum(descending) / len(descending) < 0.69


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The sort tokenizer as built, and as AutoTokenizer reads it beside the model's config."""
    from transformers import AutoTokenizer

    script, folder = load_script("sort/prepare.py"), tmp_path_factory.mktemp("tokenizer")
    built = script.make_tokenizer()
    built.save_pretrained(folder)
    script.make_model(built).config.save_pretrained(folder)
    return built, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", ["629143>", "", "0 1", "what?\n"])
def test_sort_tokenizer_read_back_gives_the_same_ids_with_one_bos(tokenizers, text):
    built, read = tokenizers
    ids = read(text)["input_ids"]
    assert ids == built(text)["input_ids"]
    assert ids == [read.bos_token_id, *read(text, add_special_tokens=False)["input_ids"]]
    assert ids.count(read.bos_token_id) == 1
    assert len(ids) == 1 + len(text)


def test_sort_tokenizer_round_trip_gives_the_text_back(tokenizers):
    text = "0123456789> 42"
    assert tokenizers[1].decode(tokenizers[1](text)["input_ids"], skip_special_tokens=True) == text


def test_sort_model_untrained_is_small_and_ends_on_the_tokenizers_eos(tokenizers):
    model = load_script("sort/prepare.py").make_model(tokenizers[0])
    assert 290_000 < model.num_parameters() < 310_000
    assert model.generation_config.eos_token_id == tokenizers[0].eos_token_id
    assert model.get_input_embeddings().num_embeddings == len(tokenizers[0])


def say_greedily(tokenizer, model, prompt: str) -> str:
    """Argmax of whole forward passes, one prompt and one token at a time."""
    ids, said = tokenizer(prompt, return_tensors="pt")["input_ids"], []
    while not said or said[-1] != tokenizer.eos_token_id:
        assert len(said) < 10, "the model has not learned to end"
        said.append(int(model(ids).logits[0, -1].argmax()))
        ids = torch.cat([ids, torch.tensor([[said[-1]]])], dim=1)
    return "".join(tokenizer.convert_ids_to_tokens(said[:-1]))


def test_sort_accuracy_over_prompts_of_unequal_length_counts_what_a_plain_loop_says(tmp_path):
    script, evaluate = load_script("sort/prepare.py"), load_script("sort/evaluate.py")
    data = script.Data(seed=0, train_rows=1, heldout_rows=1)
    script.fill_model(tmp_path, script.WarmUp(seed=0, steps=40, batch_size=32), data)
    tokenizer, model = evaluate.load_policy(tmp_path)
    prompts = ["629143>", "1629143>", "29143>", "000111>"]
    said = [say_greedily(tokenizer, model, prompt) for prompt in prompts]
    rows = [{"prompt": p, "answer": a} for p, a in zip(prompts, said, strict=True)]
    rows += [{"prompt": p, "answer": a + "0"} for p, a in zip(prompts, said, strict=True)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluate.accuracy(tmp_path, path) == 0.5
    assert evaluate.accuracy(tmp_path, path, limit=4) == 1.0


@pytest.mark.parametrize(
    ("text", "exact", "ordered"),
    [
        ("123469", 1.0, 1.0),
        ("964321", 0.0, 0.0),
        ("123496", 0.0, 4 / 6),
        ("1234", 0.0, 4 / 6),
        ("123469123469", 0.0, 0.5),
        ("", 0.0, 0.0),
    ],
)
def test_sort_rewards_on_worked_cases_give_the_worked_value(text, exact, ordered):
    rewards = load_script("sort/rewards.py")
    row = {"ground_truth": "123469", "prompt": "629143>", "num_tokens": 7}
    assert rewards.exact(text, **row) == exact
    assert rewards.ordered(text, **row) == pytest.approx(ordered)


# --- arithmetic

# What a reader makes of a question: a phrase that only this kind has, and the sum over its
# numbers in the order in which they stand.
READINGS = [
    (r"put them together", lambda a, b, friends: (a + b) / friends),
    (r"shares .* equally", lambda a, friends: a / friends),
    (r"finds .* then loses", lambda a, b, c: a + b - c),
    (r"in each and already owns", lambda a, b, c: a * b + c),
    (r"in each and sells", lambda a, b, c: a * b - c),
    (r"in each\.", lambda a, b: a * b),
    (r"brings", lambda a, b: a + b),
    (r"gives", lambda a, b: a - b),
]


def read_question(question: str) -> float:
    formula = next(formula for phrase, formula in READINGS if re.search(phrase, question))
    return formula(*map(int, re.findall(r"\d+", question)))


def test_arithmetic_rows_read_from_their_words_have_the_right_answer(arithmetic_data):
    for row in [*arithmetic_data[0], *arithmetic_data[1]]:
        question = row["prompt"][-1]["content"]
        assert float(row["answer"]) == read_question(question), question
        assert int(row["answer"]) >= 0
        assert len(re.findall(r"\d+", question)) == row["steps"] + 1


def test_arithmetic_rows_of_both_files_share_no_question(arithmetic_data):
    questions = [row["prompt"][-1]["content"] for rows in arithmetic_data for row in rows]
    assert len(set(questions)) == len(questions)
    assert all(row["prompt"][-1]["role"] == "user" for rows in arithmetic_data for row in rows)


def test_arithmetic_rows_hold_every_kind_of_problem_in_both_files(arithmetic_data):
    for rows in arithmetic_data:
        questions = " ".join(row["prompt"][-1]["content"] for row in rows)
        assert all(re.search(phrase, questions) for phrase, _ in READINGS)
        assert {row["steps"] for row in rows} == {1, 2}


def test_arithmetic_worked_example_in_the_prompt_earns_both_rewards():
    opening, rewards = (
        load_script("arithmetic/prepare.py").OPENING,
        load_script("arithmetic/rewards.py"),
    )
    shown = opening[-1]["content"]
    assert rewards.correct(shown, "5") == rewards.formatted(shown, "5") == 1.0


@pytest.mark.parametrize(
    ("text", "correct", "formatted"),
    [
        ("3 + 9 = 12. Answer: 12", 1.0, 1.0),
        ("Answer: 12.\n", 1.0, 1.0),
        ("Answer: 13", 0.0, 1.0),
        ("answer: $12", 1.0, 0.0),
        ("Answer: 3 + 9 = 12", 1.0, 0.0),
        ("Answer: 12, because 3 + 9 is 12 and not 13", 1.0, 0.0),
        ("Answer: 7. No: Answer: 12", 1.0, 0.0),
        ("Answer: 12. Answer: 7", 0.0, 0.0),
        ("So there are 12.0 of them", 1.0, 0.0),
        ("15-3 leaves 12", 1.0, 0.0),
        ("it is 15-12", 1.0, 0.0),
        ("-12", 0.0, 0.0),
        ("112", 0.0, 0.0),
        ("Answer: twelve", 0.0, 0.0),
        ("no idea", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_arithmetic_rewards_on_worked_cases_give_the_worked_value(text, correct, formatted):
    rewards = load_script("arithmetic/rewards.py")
    assert rewards.correct(text, ground_truth="12", steps=1) == correct
    assert rewards.formatted(text, ground_truth="12", steps=1) == formatted


def test_arithmetic_correct_with_a_thousands_separator_reads_one_number():
    correct = load_script("arithmetic/rewards.py").correct
    assert correct("It holds 1,200 shells", "1200") == 1.0
    assert correct("of 1, 200 and 300", "300") == 1.0


def test_arithmetic_correct_without_a_truth_abstains():
    assert load_script("arithmetic/rewards.py").correct("Answer: 12", "unknown") is None


def test_arithmetic_prepare_with_a_folder_that_is_no_model_refuses(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_script("arithmetic/prepare.py").prepare(tmp_path, 0, tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


# --- folders made whole


def test_made_folder_with_the_same_settings_is_left_alone(tmp_path):
    make_folder = load_script("whole_folder.py").make_folder
    folder = tmp_path / "deep" / "data"
    assert make_folder(folder, {"seed": 0}, lambda path: (path / "a").write_text("first"))
    assert not make_folder(folder, {"seed": 0}, lambda path: (path / "a").write_text("second"))
    assert (folder / "a").read_text() == "first"


def test_made_folder_with_other_settings_is_replaced_whole(tmp_path):
    make_folder = load_script("whole_folder.py").make_folder
    folder = tmp_path / "data"
    make_folder(folder, {"seed": 0}, lambda path: (path / "a").write_text("first"))
    assert make_folder(folder, {"seed": 1}, lambda path: (path / "b").write_text("second"))
    assert {path.name for path in folder.iterdir()} == {"b", "prepared.json"}
    assert list(tmp_path.iterdir()) == [folder]


def test_made_folder_after_a_failed_fill_is_as_it_was(tmp_path):
    make_folder = load_script("whole_folder.py").make_folder

    def fail_halfway(path: Path) -> None:
        (path / "a").write_text("half")
        raise RuntimeError("disk full")

    folder = tmp_path / "data"
    with pytest.raises(RuntimeError):
        make_folder(folder, {"seed": 0}, fail_halfway)
    assert list(tmp_path.iterdir()) == []
    make_folder(folder, {"seed": 0}, lambda path: (path / "a").write_text("whole"))
    with pytest.raises(RuntimeError):
        make_folder(folder, {"seed": 1}, fail_halfway)
    assert (folder / "a").read_text() == "whole"


def test_made_folder_over_one_of_the_user_refuses_and_keeps_it(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(FileExistsError, match="--to"):
        load_script("whole_folder.py").make_folder(tmp_path, {}, lambda path: None)
    assert (tmp_path / "mine").read_text() == "precious"
