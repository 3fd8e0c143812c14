"""What a user says about rewards."""

from typing import Any, Literal

from pydantic import Field, field_validator

from stages.settings import Section, execution
from stages.user_code import is_import_path


class RewardSpec(Section):
    """One reward: a Python function by import path, and its weight in the sum."""

    # Where the function lies is no identity: its source is, and enters keys by its digest.
    fn: str = execution(..., description="`package.module:function` or `path/file.py:function`")
    weight: float = Field(1.0, description="factor in the sum")
    name: str = Field("", description="of its column; default: the function's name")

    @field_validator("fn")
    @classmethod
    def _has_two_parts(cls, value: str) -> str:
        if not is_import_path(value):
            raise ValueError(
                f"{value!r} is no import path: write module:function or file.py:function"
            )
        return value

    def identity(self) -> dict[str, Any]:
        """Column and weight; the function itself enters by its source."""
        return {"column": self.column, "weight": self.weight}

    @property
    def column(self) -> str:
        """The reward's name in shards, metrics and tables."""
        return self.name or self.fn.rsplit(":", 1)[1]


class ScoreConfig(Section):
    """How samples are scored."""

    rewards: list[RewardSpec] = Field(min_length=1, description="summed by weight")
    on_null: Literal["drop_sample", "drop_group", "fail"] = Field(
        "drop_sample", description="what a reward that failed or abstained does to training"
    )

    @field_validator("rewards")
    @classmethod
    def _names_differ(cls, value: list[RewardSpec]) -> list[RewardSpec]:
        columns = [spec.column for spec in value]
        for column in columns:
            if columns.count(column) > 1:
                raise ValueError(f"two rewards are named {column!r}: give one a name of its own")
        return value
