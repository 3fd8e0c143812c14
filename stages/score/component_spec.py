"""What every kind of reward has: a column of its own, and a weight in the sum."""

import re
from typing import Any

from pydantic import Field, model_validator

from artifacts.keys import canonical
from stages.settings import Section

_COLUMN = re.compile(r"[A-Za-z_][\w.\-]*")


def with_stable_bytes(options: dict[str, Any]) -> dict[str, Any]:
    """``options``, which enter keys. Raises ValueError where they aren't JSON values."""
    try:
        canonical(options)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return options


class ComponentSpec(Section):
    """The part of a reward's configuration that does not depend on how it is computed."""

    weight: float = Field(
        1.0, allow_inf_nan=False, description="factor in the sum; 0: computed, and not needed"
    )
    name: str = Field("", description="of its column; default: its function's, or its kind")

    @model_validator(mode="after")
    def _has_a_column(self) -> "ComponentSpec":
        if not _COLUMN.fullmatch(self.column):
            raise ValueError(
                f"a reward's name is {self.column!r}: begin with a letter, and go on with "
                "letters, digits and _ . -"
            )
        return self

    @property
    def column(self) -> str:
        """The reward's name in shards, metrics and tables."""
        raise NotImplementedError

    @property
    def is_needed(self) -> bool:
        """Whether a sample without it has no reward."""
        return self.weight != 0

    def identity(self) -> dict[str, Any]:
        """All that changes its numbers but what enters keys by a digest."""
        fields = super().identity()
        del fields["name"]
        return {**fields, "column": self.column}
