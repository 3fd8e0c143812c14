"""Reward models and judges in whole runs: beside a function, planned, rescored, refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tiny
from artifacts.branches import open_store
from artifacts.runs import committed
from artifacts.shards import read_table
from child import run_child
from flows.cli import main
from flows.config import UserError, load_config
from flows.plan import make_plan
from judge_server import JudgeServer, judging, verdict
from tiny_run import session, train

JUDGE = {
    "model": "arbiter",
    "prompt": "Asked: {prompt}\nExpected: {ground_truth}\nGrade:\n{response}",
    "json_key": "grade",
    "scale": [0, 10],
}


@pytest.fixture(scope="module")
def judge():
    """It likes short answers."""
    with judging(lambda text, _: verdict(json.dumps({"grade": 9 - len(text)}))) as server:
        yield server


@pytest.fixture(scope="module")
def models(folder: Path) -> Path:
    """Folders of reward models: one that is whole, and others that lack something."""
    whole = tiny.save_classifier(folder / "rm")
    for name in ("no-tokenizer", "no-head", "many-labels", "no-weights", "narrow", "other-words"):
        shutil.copytree(whole, folder / name)
    (folder / "no-tokenizer" / "tokenizer.json").unlink()
    (folder / "no-weights" / "model.safetensors").unlink()
    body = tiny.classifier().model
    body.save_pretrained(folder / "headless")
    shutil.copy(folder / "headless" / "model.safetensors", folder / "no-head" / "model.safetensors")
    edit(folder / "many-labels", id2label={"0": "bad", "1": "fair", "2": "good"})
    edit(folder / "narrow", max_position_embeddings=64)
    edit(folder / "other-words", vocab_size=20)
    return folder


def edit(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def ratchet(monkeypatch, capsys):
    def run(*args: str) -> tuple[Any, str, str]:
        monkeypatch.setattr("sys.argv", ["ratchet", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def rewards(*specs: dict[str, Any]) -> str:
    return f"score.rewards={json.dumps(list(specs))}"


def table(run: str, iteration: int, stage: str) -> list[dict[str, Any]]:
    store = open_store(run)
    (found,) = committed(store, iteration, stage)
    return read_table(store, *found).to_pylist()


def logit(folder: Path, text: str) -> float:
    return logit_of(folder, tiny.tokenizer()(text)["input_ids"])


def logit_of(folder: Path, ids: list[int]) -> float:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, 0])


@pytest.fixture(scope="module")
def whole(models: Path, judge: JudgeServer) -> str:
    """A run that learns from a function, a reward model and a judge."""
    specs = rewards(
        {"fn": "rewards.py:digits"},
        {"model": "rm", "weight": 0.5},
        {"judge": judge.url, "weight": 2.0, **JUDGE},
    )
    with session("iterations=1", specs) as made:
        train(made)
    return f"{models}/runs/whole"


def test_run_learns_from_a_function_a_reward_model_and_a_judge_by_weight(
    whole: str, models: Path, judge: JudgeServer
) -> None:
    samples, rows = table(whole, 1, "rollout"), table(whole, 1, "score")
    assert len(rows) == 12
    for sample, row in zip(samples, rows, strict=True):
        text = sample["text"]
        digits = sum(c.isdigit() for c in text) / max(len(text), 1)
        rated = logit(models / "rm", sample["prompt_text"] + text)
        grade = (9 - len(text)) / 10
        assert row["reward.digits"] == digits
        assert row["reward.reward_model"] == pytest.approx(rated, abs=1e-5)
        assert row["reward.judge"] == pytest.approx(grade)
        assert row["reward"] == pytest.approx(digits + 0.5 * rated + 2 * grade, abs=1e-5)
    assert len(judge.requests) == 12
    (manifest,) = (found for _, found in committed(open_store(whole), 1, "score"))
    assert manifest.metrics["score/judge/input_tokens"] == 12 * 7


def test_stored_samples_are_rescored_by_a_reward_model_and_a_judge(
    whole: str, models: Path, judge: JudgeServer, ratchet: Any
) -> None:
    asked = {"judge": judge.url, "name": "arbiter", **JUDGE}
    args = ("--reward", "{model: rm, name: rm, weight: 3}", "--reward", json.dumps(asked))
    code, out, _ = ratchet("rescore", whole, *args, "--run", "again", "--debug", "--json")
    assert code == 0
    rows, before = table(f"{models}/runs/again", 1, "score"), table(whole, 1, "score")
    for new, old in zip(rows, before, strict=True):
        assert new["reward.rm"] == pytest.approx(old["reward.reward_model"], abs=1e-5)
        assert new["reward.arbiter"] == old["reward.judge"]
        assert new["reward"] == pytest.approx(3 * new["reward.rm"] + new["reward.arbiter"])
    (found,) = json.loads(out)["iterations"]
    assert found["new_mean"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))
    assert ratchet("verify", f"{models}/runs/again")[0] == 0


def test_plan_names_reward_models_and_judges_and_rescore_refuses_as_it_does(
    whole: str, models: Path, judge: JudgeServer, ratchet: Any
) -> None:
    specs = rewards({"model": "rm", "name": "rm"}, {"judge": judge.url, **JUDGE})
    code, out, err = ratchet("plan", "run.yaml", specs, "resources.reward_model.workers=2")
    assert code == 0, err
    lines = [" ".join(line.split()) for line in out.splitlines()]
    text = " ".join(lines)
    assert "reward rm rm" in text
    assert "context 128, template plain, on 2 workers" in text
    assert "reward judge arbiter" in text
    before = len(judge.requests)
    code, _, err = ratchet("rescore", whole, "--reward", "{model: no-head}", "--run", "refused")
    assert (code, err.count("\n")) == (2, 1)
    assert "has no weights of a head" in err
    assert len(judge.requests) == before


def refusal(*specs: dict[str, Any], **fields: Any) -> str:
    config = load_config("run.yaml", [rewards(*specs), *(f"{k}={v}" for k, v in fields.items())])
    with pytest.raises(UserError) as caught:
        make_plan(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model": "nowhere"}, "has no nowhere/config.json: give the folder of a Hugging Face"),
        ({"model": "model"}, "is a LlamaForCausalLM, and a reward model is a …ForSequence"),
        ({"model": "no-tokenizer"}, "has no tokenizer: save its own in the same folder"),
        ({"model": "no-weights"}, "has no *.safetensors"),
        ({"model": "no-head"}, "has no weights of a head"),
        ({"model": "many-labels"}, "has 3 labels (bad, fair, good), and a reward is one number"),
        ({"model": "many-labels", "label": "best"}, "has no label 'best'; it has bad, fair, good"),
        ({"model": "many-labels", "label": "good"}, "has 3 labels by its config.json, and weights"),
        ({"model": "other-words"}, "has embeddings for 20 tokens, and its tokenizer goes up to"),
        ({"model": "rm", "template": "chat"}, "has no chat template, and its template is chat"),
        ({"model": "narrow"}, "reads 64 tokens, and the longest sample has 128 of the same token"),
    ],
)
def test_folder_that_gives_no_reward_is_refused_in_a_sentence(
    models: Path, fields: dict[str, Any], sentence: str
) -> None:
    assert sentence in refusal(fields)


def test_samples_that_a_narrow_reward_model_reads_whole_are_planned(models: Path) -> None:
    limit = "data.max_prompt_tokens=58"
    assert make_plan(load_config("run.yaml", [rewards({"model": "narrow"}), limit]))


def test_chat_samples_are_refused_for_a_reward_model_without_a_template(models: Path) -> None:
    shutil.copytree("model", "talker", dirs_exist_ok=True)
    tiny.tokenizer(tiny.CHAT).save_pretrained("talker")
    fields = {"model": "talker", "data.template": "chat"}
    assert "and model 'rm' has no chat template: add" in refusal({"model": "rm"}, **fields)
    config = load_config(
        "run.yaml",
        [rewards({"model": "rm", "template": "pair"}), *(f"{k}={v}" for k, v in fields.items())],
    )
    assert make_plan(config)


def test_chat_samples_reach_both_as_messages_and_not_as_the_policy_renders_them(
    models: Path, judge: JudgeServer
) -> None:
    template = "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }}<eos>{% endfor %}"
    shutil.copytree("model", "chatty", dirs_exist_ok=True)
    tiny.tokenizer(tiny.CHAT).save_pretrained("chatty")
    tiny.save_classifier(models / "chat-rm", chat_template=template)
    specs = rewards({"model": "chat-rm", "name": "rm"}, {"judge": judge.url, **JUDGE})
    asked = len(judge.requests)
    with session("run=chat", "model=chatty", "data.template=chat", specs) as made:
        made.rollout(1)
        made.score(1)
    samples, rows = (table(f"{models}/runs/chat", 1, stage) for stage in ("rollout", "score"))
    questions = {request["messages"][0]["content"] for request in judge.requests[asked:]}
    for sample, row in zip(samples, rows, strict=True):
        prompt = sample["prompt_text"].removeprefix("<bos>").removesuffix("=")  # as CHAT has it
        text = f"u={prompt}<eos>a={sample['text']}<eos>"
        ids = tiny.tokenizer()(text, add_special_tokens=False)["input_ids"]
        assert row["reward.rm"] == pytest.approx(logit_of(models / "chat-rm", ids), abs=1e-5)
        truth = sample["ground_truth"]
        assert f"Asked: {prompt}\nExpected: {truth}\nGrade:\n{sample['text']}" in questions


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"judge": "localhost:8000"}, "rewards.0.judge is 'localhost:8000': give the endpoint's"),
        ({"judge": "http://host:port/v1"}, "give the endpoint's base URL"),
        ({"judge": "http://host/v1?version=2"}, "give the endpoint's base URL"),
        ({"scale": [5, 5]}, "give the least and the greatest verdict"),
        ({"json_key": None}, "give pattern or json_key, one of them"),
        ({"pattern": "(x)"}, "give pattern or json_key, one of them"),
        ({"json_key": None, "pattern": "("}, "it is no regular expression"),
        ({"json_key": None, "pattern": "grade"}, "it has 0 groups"),
        ({"prompt": "Grade it"}, "which holds no {response} and is no file that can be read"),
        ({"prompt": "run.yaml"}, "the rubric in run.yaml holds no {response}"),
        ({"options": {"messages": []}}, "messages is no option"),
        ({"options": {"temperature": 1}}, "temperature is no option"),
        ({"api_key_env": "JUDGE_API_KEY"}, "and there is no such variable in the environment"),
        ({"api_key_env": "HOME"}, "is no name of a variable that holds a key"),
        ({"temprature": 1}, "there is no key 'score.rewards.0.temprature': did you mean 'temp"),
        ({"attempts": 0}, "score.rewards.0.attempts is 0"),
    ],
)
def test_judge_that_cannot_be_asked_is_refused_in_a_sentence(
    models: Path, fields: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    with pytest.raises(UserError) as caught:
        make_plan(load_config("run.yaml", [rewards({"judge": "http://h/v1", **JUDGE, **fields})]))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_key_in_the_place_of_its_variable_is_refused_and_not_repeated(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError) as caught:
        load_config(
            "run.yaml", [rewards({"judge": "http://h/v1", **JUDGE, "api_key_env": "sk-012345678"})]
        )
    assert "sk-0" not in str(caught.value)
    monkeypatch.setenv("JUDGE_API_KEY", "sk-0123 45678")
    sentence = refusal({"judge": "http://h/v1", **JUDGE, "api_key_env": "JUDGE_API_KEY"})
    assert "what JUDGE_API_KEY holds is no key" in sentence
    assert "sk-0" not in sentence


RULES = """
import json, sys
from pathlib import Path
from artifacts.store import Store
from scoring import commit_rollout, make_scorers, rows_of, score
from stages.score.config import ScoreConfig
store, wanted = Store(sys.argv[1]), ScoreConfig(rewards=[{"fn": "rewards.py:short"}])
made = score(store, wanted, commit_rollout(store, ["a", "b"], 2), make_scorers(wanted))
assert [row["reward"] for row in rows_of(store, made)] == [0.5, 0.5]
modules = ("torch", "transformers", "httpx", "stages.score.judge", "stages.score.reward_model")
print(json.dumps([name for name in modules if name in sys.modules]))
"""


def test_rules_alone_load_no_reward_model_and_no_judge(folder: Path, tmp_path: Path) -> None:
    tests = Path(__file__).parent.parent
    path = f"{tests.parent}:{tests}"
    assert json.loads(run_child(RULES, tmp_path, cwd=folder, PYTHONPATH=path)) == []
