"""Every configuration field is identity or declared execution, and keys follow that line."""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin
from uuid import uuid4

import pytest

from artifacts.keys import key_of, source_digest
from artifacts.manifests import Manifest
from artifacts.store import Store
from flows.config import Config, make_config
from flows.critic_checks import critic_digest
from flows.evaluation_config import EvaluateConfig, EvaluationData
from flows.iteration import Iteration, Round
from flows.plan import Plan, prompt_limit
from flows.revisions import Revision, Run
from flows.session import Session
from plain_run import commit_prompts
from stages.contract import Committed, Work
from stages.groups import NULL_POLICIES
from stages.models import model_digest, tokenizer_digest
from stages.rollout.config import DataConfig
from stages.rollout.rows import data_digest
from stages.score.judge_spec import JudgeSpec
from stages.score.reward_model_spec import RewardModelSpec
from stages.settings import Section, is_execution
from stages.update.run import function_digests
from stages.user_code import load_function

# Where, how fast, how often: none of these changes a number. A field that is new or renamed and
# is not here must be identity.
EXECUTION = {
    "run",
    "store",
    "model",  # its files enter keys by their digest
    "iterations",  # enters an update's key where a learning rate falls towards the end
    "data.path",  # its rows enter keys by their digest
    "data.sources[].path",  # the same
    "rollout.gpu_memory",
    "rollout.max_sequences",
    "score.max_error_share",
    "score.retries",
    "score.rewards[].calls_per_second",
    "score.rewards[].concurrency",
    "score.rewards[].environment",
    "score.rewards[].fn",  # its source enters keys by its digest
    "score.rewards[].timeout_seconds",
    "update.activation_checkpointing",
    "update.critic.model",  # its files enter keys by their digest
    "update.algorithm",  # names a preset: the fields that it sets are identity
    "update.max_tokens_per_rank",
    "update.sp",
    "checkpoint.every",
    "evaluate",  # enters the keys of evaluations, and none of training
    "lease.single_writer",
    "lease.ttl_seconds",
    "resources.ray_address",
    "resources.reward_model.gpus",
    "resources.reward_model.threads",
    "resources.reward_model.workers",
    "resources.rollout.engines",
    "resources.rollout.gpus",
    "resources.rollout.threads",
    "resources.score.gpus",
    "resources.score.threads",
    "resources.score.workers",
    "resources.update.gpus",
    "resources.update.ranks",
    "resources.update.threads",
    "retries.attempts",
    "retries.delay_seconds",
    "tracking.enabled",
    "tracking.experiment",
    "tracking.samples",
    "tracking.uri",
}

# The same of rewards that are asked for: a reward model, a judge.
EXECUTION_OF_A_MODEL = {
    "max_tokens_per_batch",
    "model",  # its files enter keys by their digest
}
EXECUTION_OF_A_JUDGE = {
    "api_key_env",
    "attempts",
    "concurrency",
    "judge",  # where the model answers; which one it is, is its name
    "price_per_million_tokens.input",
    "price_per_million_tokens.output",
    "prompt",  # its text enters keys by its digest
    "requests_per_minute",
    "timeout_seconds",
}

CONFIG = make_config(
    {
        "model": "models/tiny",
        "iterations": 3,
        "data": {"sources": [{"path": "sums.jsonl"}, {"path": "products.jsonl", "weight": 3}]},
        "score": {
            "rewards": [
                {"fn": "my_rewards.py:exact"},
                {"fn": "my_rewards.py:short", "weight": 2},
            ]
        },
        "update": {"critic": {"model": "models/tiny"}},
    },
    [],
    "test",
)
# Columns of one file are said elsewhere than those of several.
OF_ONE_FILE = CONFIG.model_copy(update={"data": DataConfig(path="sums.jsonl")})
REWARDS = "def exact(text, **row):\n    return 1.0\n\n\ndef short(text, **row):\n    return 0.0\n"


def walk(section: Section, prefix: str = "", declared: bool = False) -> Iterator[tuple[str, bool]]:
    """Every field below ``section`` as (dotted path, whether it is declared execution)."""
    for name, field in type(section).model_fields.items():
        path = f"{prefix}{name}"
        is_declared = declared or is_execution(field.json_schema_extra)
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from walk(value, f"{path}.", is_declared)
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            yield from walk(value[0], f"{path}[].", is_declared)
        else:
            yield path, is_declared


FIELDS = dict(walk(CONFIG))


def with_change(section: Section, path: str) -> Section:
    """A copy of ``section`` in which the field at ``path`` has another value."""
    name, _, rest = path.partition(".")
    if name.endswith("[]"):
        first, *others = getattr(section, name[:-2])
        return section.model_copy(update={name[:-2]: [with_change(first, rest), *others]})
    if rest:
        return section.model_copy(update={name: with_change(getattr(section, name), rest)})
    annotation = type(section).model_fields[name].annotation
    return section.model_copy(update={name: another(annotation, getattr(section, name))})


def another(annotation: Any, value: Any) -> Any:
    """A value of type ``annotation`` that is not ``value``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return next((choice for choice in arguments if choice != value), f"not {value}")
    if origin in (Union, types.UnionType):
        inner = next(each for each in arguments if each is not types.NoneType)
        return another(inner, value)
    if origin is tuple:
        return (another(arguments[0], value[0]), *value[1:])
    if origin is dict:
        return {**value, "another": 1}
    if origin is list:
        return [*value, another(arguments[0], None)]
    if annotation is EvaluateConfig:
        return EvaluateConfig(data=EvaluationData(path="sums.jsonl"))
    if annotation is bool:
        return not value
    if annotation in (int, float):
        return annotation((value or 0) + 1)
    if annotation is str:
        # What stands after the colon of a reward names its column, and that is identity.
        return f"elsewhere/{value or ''}"
    raise NotImplementedError(f"no other value of {annotation}: teach this function that type")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the configuration names, and once more under ``elsewhere/``: paths change no number."""
    folder = tmp_path_factory.mktemp("inputs")
    model = folder / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"max_position_embeddings": 4096}')
    (model / "model.safetensors").write_bytes(b"weights")
    (folder / "sums.jsonl").write_text('{"prompt": "1+1"}')
    (folder / "products.jsonl").write_text('{"prompt": "1*1"}')
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "elsewhere").symlink_to(folder)
    return folder


def stage_keys(config: Config) -> dict[str, str]:
    """The keys of a first iteration's work, as a session describes it."""
    plan = Plan(
        config=config,
        context=4096,
        max_prompt_tokens=prompt_limit(config),
        model_digest=model_digest(config.model),
        tokenizer_digest=tokenizer_digest(config.model),
        data_digest=data_digest(config.data),
        functions={
            # Not all that is tried here could be called so.
            spec.column: source_digest(load_function(spec.fn, "reward"))
            for spec in config.score.rewards
        },
        update_functions=function_digests(config.update),
        critic_digest=critic_digest(config),
    )
    session = Session(Run(Store(f"memory://{uuid4().hex}"), [Revision(1, plan)]))
    prompts = commit_prompts(session.store, plan)
    session.iterations[1] = seen = Iteration()
    rollout = session.rollout_work(1)
    seen.rounds.append(Round(_as_committed(rollout)))
    score = session.score_work(1)
    spread = dict.fromkeys(NULL_POLICIES, config.data.batch_size)
    scores = _as_committed(score, groups_with_spread=spread)
    seen.rounds[0] = Round(seen.rounds[0].rollout, scores)
    keys = {work.stage: work.key for work in (rollout, score, session.update_work(1))}
    return {"prompts": prompts.manifest.key, **keys}


def _as_committed(work: Work, **outcome: Any) -> Committed:
    made = Manifest(
        work.kind, work.stage, work.version, work.key, work.identity, {}, work.inputs, (), outcome
    )
    return Committed(work.folder, made, was_reused=False)


def changed_keys(path: str) -> list[str]:
    """The stages whose keys another value at ``path`` changes, in a run of one file or several."""
    changed = set()
    for config in (CONFIG, OF_ONE_FILE):
        is_there = path in dict(walk(config)) and (path, config) != ("data.path", CONFIG)
        if is_there:
            before, after = stage_keys(config), stage_keys(with_change(config, path))
            changed |= {stage for stage in before if before[stage] != after[stage]}
    return sorted(changed)


def test_config_fields_declared_execution_are_those_listed_here() -> None:
    assert {path for path, is_declared in FIELDS.items() if is_declared} == EXECUTION


def test_config_walk_reaches_fields_at_every_depth() -> None:
    assert {"seed", "update.lr", "score.rewards[].weight", "resources.rollout.gpus"} <= set(FIELDS)
    assert not any(isinstance(value, Section) for value in CONFIG.identity().values())


@pytest.mark.parametrize("path", [path for path in FIELDS if path not in EXECUTION])
def test_config_identity_changes_with_an_identity_field(path: str) -> None:
    changed = with_change(CONFIG, path)
    assert changed != CONFIG
    assert key_of(changed.identity()) != key_of(CONFIG.identity())


@pytest.mark.parametrize("path", sorted(EXECUTION))
def test_config_identity_is_blind_to_an_execution_field(path: str) -> None:
    changed = with_change(CONFIG, path)
    assert changed != CONFIG
    assert key_of(changed.identity()) == key_of(CONFIG.identity())


def test_config_identity_of_defaults_written_out_is_that_of_defaults_left_out() -> None:
    written = make_config(CONFIG.model_dump(), [], "test")
    assert key_of(written.identity()) == key_of(CONFIG.identity())


@pytest.mark.parametrize("path", [path for path in FIELDS if path not in EXECUTION])
def test_stage_keys_change_with_an_identity_field(
    path: str, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs)
    assert changed_keys(path) != []


@pytest.mark.parametrize("path", sorted(EXECUTION))
def test_stage_keys_are_blind_to_an_execution_field(
    path: str, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs)
    assert changed_keys(path) == []


ASKED = {
    "model": RewardModelSpec(model="models/tiny"),
    "judge": JudgeSpec(
        judge="http://host/v1",
        model="arbiter",
        prompt="rubric.txt",
        pattern="(.)",
        scale=(0, 9),
        price_per_million_tokens={"input": 1, "output": 2},
    ),
}


@pytest.mark.parametrize(
    ("kind", "declared"), [("model", EXECUTION_OF_A_MODEL), ("judge", EXECUTION_OF_A_JUDGE)]
)
def test_identity_of_a_reward_that_is_asked_for_changes_with_all_but_its_execution(
    kind: str, declared: set[str]
) -> None:
    spec = ASKED[kind]
    found = set()
    for path, _ in walk(spec):
        changed = with_change(spec, path)
        assert changed != spec
        if key_of(changed.identity()) == key_of(spec.identity()):
            found.add(path)
    assert found == declared
    assert spec.identity()["kind"] == kind
