"""The base of every configuration section, and the line between identity and execution.

A field is *identity* unless it is declared with :func:`execution`. Identity fields change numbers
and enter keys; execution fields say where, how fast and how often, and never do.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from artifacts.secrets import holds_credentials

CREDENTIALS = "credentials"


class Section(BaseModel):
    """A strict, frozen part of the configuration: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*")
    @classmethod
    def _holds_no_credentials(cls, value: Any) -> Any:
        # Of an own type, so that whoever prints it knows not to repeat the value.
        if isinstance(value, str) and holds_credentials(value):
            raise PydanticCustomError(
                CREDENTIALS,
                "holds a URL with a password, a key or a signature, and would be written into "
                "records: leave it out, and give credentials by the environment",
            )
        return value

    def identity(self) -> dict[str, Any]:
        """The fields that change numbers, as JSON values, sections within sections too."""
        return {
            name: _identity_of(getattr(self, name))
            for name, field in type(self).model_fields.items()
            if not is_execution(field.json_schema_extra)
        }


def execution(default: Any, **options: Any) -> Any:
    """A pydantic field that changes no number: placement, memory, retries, paths of output."""
    return Field(default, json_schema_extra={"execution": True}, **options)


def is_execution(extra: Any) -> bool:
    """Whether a field's ``json_schema_extra`` marks it as execution."""
    return isinstance(extra, dict) and bool(extra.get("execution"))


def _identity_of(value: Any) -> Any:
    if isinstance(value, Section):
        return value.identity()
    if isinstance(value, list | tuple):
        return [_identity_of(item) for item in value]
    return value
