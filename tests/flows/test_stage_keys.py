"""Keys of every stage's work: the same wherever and whenever they are computed, another for other
work."""

import json
from pathlib import Path

import pytest

from child import run_child

REWARD = "def exact(text, **row):\n    return 1.0\n"

# As a run does it, from the folder of its model, data and rewards. The clock and the host's name
# are others in each process.
KEYED = """
import json, platform, socket, sys, time
model, data, reward, now, host = sys.argv[1:6]
time.time = lambda: float(now)
socket.gethostname = platform.node = lambda: host
from artifacts.manifests import Manifest, Ref
from flows.config import make_config
from flows.plan import make_plan
from stages.contract import Committed
from stages.rollout.prompts import prompt_work
from stages.rollout.run import rollout_work
from stages.score.run import score_work
from stages.update.run import update_work
values = {
    "model": model,
    "iterations": 3,
    "data": {"path": data, "batch_size": 4},
    "rollout": {"samples_per_prompt": 2, "max_new_tokens": 4},
    "score": {"rewards": [{"fn": f"{reward}:exact"}]},
    "update": {"lr": 1e-4},
}
changes = json.loads(sys.argv[6])
order = reversed if changes.pop("turned", False) else list
plan = make_plan(make_config(dict(order(values.items())), changes.pop("overrides", []), "x"))
config = plan.config
prompts = prompt_work(
    config.data, plan.data_digest, plan.tokenizer_digest, plan.max_prompt_tokens
)
def committed(work, digest):
    made = Manifest(work.kind, work.stage, 1, work.key, {"input": digest}, {}, {}, ())
    return Committed(work.folder, made, False)
base = Ref("model", plan.model_digest)
rollout = rollout_work(
    1, config.data, config.rollout, config.seed, committed(prompts, "p").ref, base, [],
    range(4),
)
made = committed(rollout, changes.pop("rollout", "r"))
score = score_work(1, config.score, plan.functions, made, None)
update = update_work(
    1, config.update, config.score.on_null, config.rollout.temperature, config.total_steps,
    [(made.ref, committed(score, "s").ref)], base, plan.update_functions, None,
)
print(json.dumps({work.stage: work.key for work in (prompts, rollout, score, update)}))
"""


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder with a model of nothing, two prompts and a reward; a link to the model beside it."""
    folder = tmp_path / "inputs"
    model = folder / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(2)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARD)
    (tmp_path / "link").symlink_to(folder)
    return folder


def keys(inputs: Path, *paths: str, cwd: Path | None = None, **changes: object) -> dict[str, str]:
    environment = changes.pop("environment", {})
    now, host = changes.pop("now", 1e9), changes.pop("host", "here")
    paths = paths or ("models/tiny", "rows.jsonl", "rewards.py")
    found = run_child(
        KEYED, *paths, now, host, json.dumps(changes), cwd=cwd or inputs, **environment
    )
    return dict(json.loads(found))


def test_stage_keys_are_the_same_in_any_process_place_and_time(
    inputs: Path, tmp_path: Path
) -> None:
    here = keys(inputs, environment={"PYTHONHASHSEED": "1", "TZ": "UTC"})
    assert list(here) == ["prompts", "rollout", "score", "update"]
    there = keys(
        inputs,
        *(str(inputs / path) for path in ("models/tiny/", "rows.jsonl", "rewards.py")),
        cwd=tmp_path,
        now=4e9,
        host="there",
        turned=True,
        environment={
            "PYTHONHASHSEED": "2",
            "TZ": "Asia/Tokyo",
            "HOME": str(tmp_path),
            "HOSTNAME": "there",
            "LC_ALL": "C",
        },
    )
    assert there == here
    link = str(tmp_path / "link")
    linked = (f"{link}/models/tiny", f"{link}/../inputs/rows.jsonl", f"{link}/rewards.py")
    assert keys(inputs, *linked, cwd=tmp_path) == here
    assert keys(inputs, "./models//tiny", "./rows.jsonl", "../inputs/rewards.py") == here


ALL, AFTER_PROMPTS, AFTER_ROLLOUT = (
    ["prompts", "rollout", "score", "update"],
    ["rollout", "score", "update"],
    ["score", "update"],
)


def append(path: str, text: str):
    def change(inputs: Path) -> None:
        with (inputs / path).open("a") as file:
            file.write(text)

    return change


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (append("rewards.py", "# another comment\n"), AFTER_ROLLOUT),
        (append("rows.jsonl", '{"prompt": "2?", "answer": "2"}\n'), ALL),
        (append("models/tiny/model.safetensors", "."), AFTER_PROMPTS),
        (append("models/tiny/tokenizer.json", "{}"), ALL),
    ],
    ids=["code", "data", "model", "tokenizer"],
)
def test_stage_keys_change_with_what_is_read_from_where_it_enters(
    inputs: Path, change, changed: list[str]
) -> None:
    before = keys(inputs)
    change(inputs)
    after = keys(inputs)
    assert [stage for stage in before if before[stage] != after[stage]] == changed


def test_stage_keys_change_with_a_config_value_and_an_inputs_digest(inputs: Path) -> None:
    before = keys(inputs)
    for change, changed in [
        ({"overrides": ["rollout.temperature=0.5"]}, AFTER_PROMPTS),
        ({"overrides": ["update.lr=2e-4"]}, ["update"]),
        ({"overrides": ["score.on_null=drop_group"]}, ["update"]),
        ({"rollout": "another"}, AFTER_ROLLOUT),
    ]:
        after = keys(inputs, **change)
        assert [stage for stage in before if before[stage] != after[stage]] == changed


def test_stage_keys_of_a_config_with_nan_are_refused_by_its_name(inputs: Path) -> None:
    with pytest.raises(AssertionError, match=r"update\.lr is nan"):
        keys(inputs, overrides=["update.lr=.nan"])
