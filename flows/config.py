"""One YAML file to one strict model, with ``key=value`` overrides."""

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from artifacts.secrets import redacted
from flows.evaluation_config import EvaluateConfig
from stages.rollout.config import PAIR, DataConfig, RolloutConfig
from stages.score.config import REWARD_KINDS, ScoreConfig
from stages.settings import CREDENTIALS, Section, execution
from stages.update.config import UpdateConfig


class UserError(Exception):
    """The user asked for something that can't be: one plain sentence, exit 2."""


class CheckpointConfig(Section):
    """When weights and trainer state are kept."""

    every: int = execution(10, ge=1, description="iterations between snapshots; the last has one")


class RolloutResources(Section):
    """Where engines run."""

    engines: int = execution(1, ge=1, description="engine processes")
    gpus: float = execution(0.0, ge=0, description="GPUs of one engine; a fraction shares one")
    threads: int | None = execution(None, ge=1, description="CPU threads of one; null: all cores")


class ScoreResources(Section):
    """Where rewards and the reference model run."""

    workers: int = execution(2, ge=1, description="worker processes")
    gpus: float = execution(0.0, ge=0, description="GPUs of one worker, for the reference model")
    threads: int | None = execution(None, ge=1, description="CPU threads of one; null: a share")


class RewardModelResources(Section):
    """Where reward models run."""

    workers: int = execution(1, ge=1, description="worker processes of each reward model")
    gpus: float = execution(0.0, ge=0, description="GPUs of one worker; a fraction shares one")
    threads: int | None = execution(None, ge=1, description="CPU threads of one; null: a share")


class UpdateResources(Section):
    """Where trainer ranks run."""

    ranks: int = execution(1, ge=1, description="trainer processes; weights are shared out")
    gpus: float = execution(0.0, ge=0, description="GPUs of one rank; a fraction shares one")
    threads: int | None = execution(None, ge=1, description="CPU threads of one; null: a share")


class Resources(Section):
    """What a run may use. Moving from a laptop to GPUs changes this section only."""

    ray_address: str | None = execution(None, description="a Ray cluster; null: one for this run")
    rollout: RolloutResources = execution(RolloutResources())
    score: ScoreResources = execution(ScoreResources())
    reward_model: RewardModelResources = execution(RewardModelResources())
    update: UpdateResources = execution(UpdateResources())


class TrackingConfig(Section):
    """Where MLflow keeps the run."""

    enabled: bool = execution(True)
    uri: str | None = execution(None, description="null: an SQLite file beside the runs")
    experiment: str = execution("ratchet")
    samples: int = execution(32, ge=0, description="rows of an iteration's sample table; 0: none")


class RetryConfig(Section):
    """What Prefect does when a stage fails."""

    attempts: int = execution(2, ge=0, description="repeats of a failed stage")
    delay_seconds: float = execution(2.0, ge=0, description="before the first; doubles after")


class LeaseConfig(Section):
    """How a run keeps to one writer at a time."""

    ttl_seconds: float = execution(
        30.0, ge=1, description="a writer that is silent for so long may be taken over from"
    )
    single_writer: bool = execution(
        False, description="there is one, says the user: go on where the store can't make sure"
    )


def _names_pairs(data: Any) -> bool:
    """Whether a section ``data``, as the user wrote it, names a pair's columns."""
    if not isinstance(data, dict):
        return False
    sources = data.get("sources")
    parts = [data, *(sources if isinstance(sources, list) else [])]
    return any(isinstance(part, dict) and bool(part.get("chosen")) for part in parts)


class Config(Section):
    """A run."""

    run: str = execution("run", description="name; the run lies at <store>/<run>")
    store: str = execution("runs", description="path or fsspec URL of the folder of runs")
    model: str = execution(..., description="folder of a Hugging Face causal language model")
    seed: int = Field(0, ge=0)
    iterations: int = execution(..., ge=1, description="how far to go")
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    score: ScoreConfig = ScoreConfig()
    update: UpdateConfig = UpdateConfig()
    checkpoint: CheckpointConfig = execution(CheckpointConfig())
    resources: Resources = execution(Resources())
    tracking: TrackingConfig = execution(TrackingConfig())
    retries: RetryConfig = execution(RetryConfig())
    lease: LeaseConfig = execution(LeaseConfig())
    evaluate: EvaluateConfig | None = execution(
        None, description="on held-out data; its own keys hold it, and none of training"
    )

    @model_validator(mode="before")
    @classmethod
    def _takes_two_of_a_pair(cls, values: Any) -> Any:
        """Where the data holds pairs, a group is of two unless the user says otherwise."""
        if not isinstance(values, dict) or not _names_pairs(values.get("data")):
            return values
        rollout = values.get("rollout") or {}
        if not isinstance(rollout, dict):
            return values
        return {**values, "rollout": {"samples_per_prompt": len(PAIR), **rollout}}

    @property
    def url(self) -> str:
        """Where the run lies."""
        store = self.store
        if "://" not in store:
            store = os.path.abspath(os.path.expanduser(store))
        return f"{store.rstrip('/')}/{self.run}"

    @property
    def total_steps(self) -> int:
        """Optimizer steps planned over the run."""
        return self.iterations * self.update.minibatches


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the YAML file ``path``, with overrides applied.

    Raises:
        UserError: something about it is wrong; the message says what and what to do.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise UserError(
            f"config {path!r} can't be read ({error.strerror}): check the path"
        ) from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"config {path!r} is not YAML: {_where(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"config {path!r} holds no mapping: write `key: value` lines")
    return make_config(values, overrides, path)


def make_config(values: dict[str, Any], overrides: Sequence[str], source: str) -> Config:
    """The configuration of plain ``values`` with overrides applied. Raises UserError."""
    for override in overrides:
        values = override_value(values, override)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{source}: {_sentence(error, Config)}") from None


def override_value(values: dict[str, Any], override: str) -> dict[str, Any]:
    """``values`` with one ``a.b.c=value`` applied; the value is read as YAML."""
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise UserError(f"override {redacted(override)!r} is not key=value, such as update.lr=1e-5")
    keys = name.split(".")
    return _set(values, keys, _scalar(text), override)


def _set(values: Any, keys: Sequence[str], value: Any, override: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UserError(f"override {redacted(override)!r}: {keys[0]!r} lies in no section")
    rest = value if len(keys) == 1 else _set(values.get(keys[0]) or {}, keys[1:], value, override)
    return {**values, keys[0]: rest}


def _scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        # YAML 1.1 reads 1e-5 as text, for want of a point.
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _sentence(error: ValidationError, model: type[BaseModel]) -> str:
    """The first thing wrong, as a sentence."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part not in REWARD_KINDS)
    if first["type"] == CREDENTIALS:
        return f"{place} {first['msg']}"
    if first["type"] == "extra_forbidden":
        return f"there is no key {place!r}{_nearest(model, first['loc'])}"
    if first["type"] == "missing":
        return f"the key {place!r} is missing, and it has no default"
    reason = first["msg"].removeprefix("Value error, ")
    reason = reason[0].lower() + reason[1:]
    return f"{place} is {redacted(repr(first['input']))}: {reason}"


def _where(error: yaml.YAMLError) -> str:
    """Where and what, without the line of the file that the error quotes: it may hold anything."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return type(error).__name__
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {redacted(error.problem or '')}"


def _nearest(model: type[BaseModel], place: Sequence[int | str]) -> str:
    fields = _fields_at(model, place[:-1])
    close = difflib.get_close_matches(str(place[-1]), fields, n=1, cutoff=0.5)
    if close:
        return f": did you mean {close[0]!r}?"
    return f"; there are {', '.join(sorted(fields))}"


def _fields_at(model: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    for part in place:
        if part in REWARD_KINDS:
            model = REWARD_KINDS[str(part)]
        elif isinstance(part, str):
            annotation: Any = model.model_fields[part].annotation
            arguments = getattr(annotation, "__args__", ())
            model = next((a for a in arguments if isinstance(a, type)), annotation)
    return list(model.model_fields)


@dataclass(frozen=True)
class Difference:
    """A field that two resolved configurations hold different values of."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field}: {_short(self.old)} → {_short(self.new)}"


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[Difference]:
    """Where two resolved configurations differ, field by field, in order of their names."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name), new.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            found += differences(was, now, f"{prefix}{name}.")
        elif was != now:
            found.append(Difference(f"{prefix}{name}", was, now))
    return found


def _short(value: Any) -> str:
    is_digest = isinstance(value, str) and len(value) == 64
    return f"{value[:12]}…" if is_digest else repr(value)
