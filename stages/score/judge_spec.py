"""What a user says about a reward that a language model writes: a judge behind an HTTP endpoint."""

import math
import os
import re
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from stages.score.component_spec import ComponentSpec, with_stable_bytes
from stages.score.environment import looks_like_credential
from stages.settings import CREDENTIALS, Section, execution

_MUST_HOLD = "{response}"
# Fields of a request that are ours, and those that options may leave out but not set.
_OURS = ("model", "messages", "n", "stream")
_SET_ELSEWHERE = ("temperature", "max_tokens")
# What a header takes. A key with a line end in it, as files have, would be quoted by an error.
_KEY = re.compile(r"[!-~]+")


class TokenPrice(Section):
    """What an endpoint takes for a million tokens, in any currency."""

    input: float = execution(..., ge=0)
    output: float = execution(..., ge=0)


class JudgeSpec(ComponentSpec):
    """A judge: a model behind an OpenAI-compatible endpoint, a rubric, and how to read it."""

    batched: ClassVar[bool] = True
    per_token: ClassVar[bool] = False

    judge: str = execution(..., description="the endpoint's base URL, such as http://host:8000/v1")
    model: str = Field(..., min_length=1, description="the name that the endpoint knows it by")
    # Its text is identity, wherever it stands, and enters keys by its digest.
    prompt: str = execution(
        ...,
        description="the rubric, or the file of it: a text with {response}, and where wanted "
        "{prompt} and {ground_truth}",
    )
    pattern: str | None = Field(
        None, description="regular expression with one group, the verdict; its last match counts"
    )
    json_key: str | None = Field(
        None, description="instead: where the verdict stands in the answer's last JSON object"
    )
    scale: tuple[float, float] = Field(
        ..., description="least and greatest verdict, which become rewards of 0.0 and 1.0"
    )
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)
    max_tokens: int = Field(512, ge=1, description="of an answer")
    options: dict[str, Any] = Field(
        {}, description="more fields of the request; null leaves temperature or max_tokens out"
    )
    concurrency: int = execution(8, ge=1, description="requests in flight in a worker")
    requests_per_minute: float | None = execution(
        None, gt=0, description="begun, over all workers, repeated ones included; null: no limit"
    )
    timeout_seconds: float = execution(60.0, gt=0, description="for one request")
    attempts: int = execution(4, ge=1, description="requests for a sample, before it is an error")
    api_key_env: str | None = execution(
        None, description="name of the environment variable that holds the key; null: none is sent"
    )
    price_per_million_tokens: TokenPrice | None = execution(
        None, description="for the cost among the metrics"
    )

    @field_validator("judge")
    @classmethod
    def _is_an_endpoint(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            is_whole = parts.scheme in ("http", "https") and bool(parts.hostname)
            is_whole = is_whole and parts.port != 0 and not (parts.query or parts.fragment)
        except ValueError:  # of a port or an address that is none
            is_whole = False
        if not is_whole or any(character.isspace() for character in value):
            raise ValueError("give the endpoint's base URL, such as http://localhost:8000/v1")
        return value.rstrip("/")

    @field_validator("options")
    @classmethod
    def _are_free_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in _OURS or (name in _SET_ELSEWHERE and value[name] is not None):
                raise ValueError(f"{name} is no option: leave it to the other fields")
        return with_stable_bytes(value)

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, value: str | None) -> str | None:
        if value is None:
            return value
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"it is no regular expression: {error}") from None
        if groups != 1:
            raise ValueError(
                f"it has {groups} groups, and the verdict is what one group holds: write (?:…) "
                "for the others"
            )
        return value

    @field_validator("scale")
    @classmethod
    def _rises(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not (math.isfinite(value[0]) and math.isfinite(value[1]) and value[0] < value[1]):
            raise ValueError("give the least and the greatest verdict, such as [1, 10]")
        return value

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        if value is None:
            return value
        is_name = re.fullmatch(r"[A-Z_][A-Z0-9_]*", value) is not None
        if not is_name or not looks_like_credential(value):
            # Of an own type, whose value nobody prints: it may be the key itself.
            raise PydanticCustomError(
                CREDENTIALS,
                "is no name of a variable that holds a key, such as JUDGE_API_KEY, which no "
                "reward's process is shown: set such a variable, and give its name",
            )
        return value

    @model_validator(mode="after")
    def _is_read_one_way(self) -> "JudgeSpec":
        if (self.pattern is None) == (self.json_key is None):
            raise ValueError("give pattern or json_key, one of them: how the verdict is read")
        return self

    @property
    def column(self) -> str:
        return self.name or "judge"

    def identity(self) -> dict[str, Any]:
        return {"kind": "judge", **super().identity()}


def rubric_of(spec: JudgeSpec) -> str:
    """The rubric's text.

    Raises:
        ValueError: there is no such file, or the text has no place for the response.
    """
    if _MUST_HOLD in spec.prompt:
        return spec.prompt
    try:
        text = Path(spec.prompt).read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise ValueError(
            f"reward {spec.column!r}: prompt is {spec.prompt[:80]!r}, which holds no {_MUST_HOLD} "
            "and is no file that can be read: write the rubric, or the path of a text file"
        ) from None
    if _MUST_HOLD not in text:
        raise ValueError(
            f"reward {spec.column!r}: the rubric in {spec.prompt} holds no {_MUST_HOLD}: say where "
            "what is judged stands"
        )
    return text


def api_key_of(spec: JudgeSpec) -> str | None:
    """The endpoint's key; None where none is to be sent.

    Raises:
        ValueError: the variable that is to hold it is not set.
    """
    if spec.api_key_env is None:
        return None
    key = os.environ.get(spec.api_key_env, "").strip()
    if not key:
        raise ValueError(
            f"reward {spec.column!r}: api_key_env is {spec.api_key_env}, and there is no such "
            "variable in the environment: set it to the endpoint's key"
        )
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"reward {spec.column!r}: what {spec.api_key_env} holds is no key: it has spaces or "
            "letters that no HTTP header takes"
        )
    return key


def with_rubric(spec: JudgeSpec) -> JudgeSpec:
    """``spec`` with the rubric itself for its file: workers read what was read here."""
    return spec.model_copy(update={"prompt": rubric_of(spec)})
