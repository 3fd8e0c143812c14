"""What a user says about rewards."""

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, field_validator

from stages.score.builtin import BUILTINS
from stages.score.component_spec import ComponentSpec, with_stable_bytes
from stages.score.judge_spec import JudgeSpec
from stages.score.reward_model_spec import RewardModelSpec
from stages.settings import Section, execution
from stages.user_code import is_import_path

# What statistics of the sum are called; a component of that name would hide one.
_STATISTICS = ("mean", "std", "min", "max", "null_share")


class RewardSpec(ComponentSpec):
    """One reward: a built-in or a Python function by import path, and its weight in the sum."""

    # Where the function lies is no identity: its source is, and enters keys by its digest.
    fn: str = execution(
        ..., description="a built-in's name, `package.module:function` or `path/file.py:function`"
    )
    batched: bool = Field(False, description="called with all samples of a shard: list to list")
    per_token: bool = Field(False, description="gives a list, one number a response token")
    options: dict[str, Any] = Field({}, description="passed as keyword arguments; any JSON values")
    timeout_seconds: float | None = execution(
        60.0, gt=0, description="for a call, after which its process is killed; null: none"
    )
    concurrency: int = execution(
        1, ge=1, description="calls in flight in a worker; above 1 for async functions"
    )
    calls_per_second: float | None = execution(
        None, gt=0, description="calls begun, over all workers; for async functions"
    )
    environment: list[str] = execution(
        [], description="variables that its process keeps although they look like credentials"
    )

    @field_validator("fn")
    @classmethod
    def _is_named(cls, value: str) -> str:
        if value in BUILTINS or is_import_path(value):
            return value
        close = difflib.get_close_matches(value, BUILTINS, n=1)
        hint = f"did you mean {close[0]!r}? " if close and ":" not in value else ""
        raise ValueError(
            f"{value!r} is no import path: {hint}write module:function, file.py:function or one "
            f"of {', '.join(sorted(BUILTINS))}"
        )

    @field_validator("options")
    @classmethod
    def _has_stable_bytes(cls, value: dict[str, Any]) -> dict[str, Any]:
        return with_stable_bytes(value)

    @property
    def column(self) -> str:
        """The reward's name in shards, metrics and tables."""
        return self.name or self.fn.rsplit(":", 1)[-1]


# How a reward's configuration says of which kind it is, in places of errors too.
REWARD_KINDS: dict[str, type[ComponentSpec]] = {
    "<judge>": JudgeSpec,
    "<model>": RewardModelSpec,
    "<fn>": RewardSpec,
}


def _kind(value: Any) -> str:
    fields = type(value).model_fields if isinstance(value, BaseModel) else value
    names = fields if isinstance(fields, dict) else {}
    return next((kind for kind in REWARD_KINDS if kind[1:-1] in names), "<fn>")


AnyReward = Annotated[
    Annotated[JudgeSpec, Tag("<judge>")]
    | Annotated[RewardModelSpec, Tag("<model>")]
    | Annotated[RewardSpec, Tag("<fn>")],
    Discriminator(_kind),
]


def judges(rewards: Sequence[AnyReward]) -> list[JudgeSpec]:
    """Those of ``rewards`` that a judge gives."""
    return [spec for spec in rewards if isinstance(spec, JudgeSpec)]


class ScoreConfig(Section):
    """How samples are scored."""

    rewards: list[AnyReward] = Field(
        [], description="summed by weight; none where the data holds pairs, whose verdict is known"
    )
    on_null: Literal["drop_sample", "drop_group", "fail"] = Field(
        "drop_sample", description="what a reward that failed or abstained does to training"
    )
    max_error_share: float = execution(
        0.5, ge=0, le=1, description="share of samples that may have an error; above, scoring stops"
    )
    retries: int = execution(2, ge=0, description="replacements of workers that die on one shard")

    @field_validator("rewards")
    @classmethod
    def _names_differ(cls, value: list[AnyReward]) -> list[AnyReward]:
        metrics: set[str] = set(_STATISTICS)
        for column in (spec.column for spec in value):
            mine = {column, *(f"{column}_{statistic}" for statistic in _STATISTICS)}
            if metrics & mine:
                raise ValueError(
                    f"two rewards are named {column!r}, or one is named as a statistic of "
                    "another: give one a name of its own"
                )
            metrics |= mine
        return value
