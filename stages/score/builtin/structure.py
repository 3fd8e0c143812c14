"""Whether a response is JSON of a given schema."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def json_schema(text: str, schema: Mapping[str, Any], fenced: bool = False, **row: object) -> float:
    """1.0 where the response is JSON that ``schema`` (draft 2020-12) takes, else 0.0.

    Args:
        fenced: judge the last ``` block, and 0.0 where there is none. NaN and infinities, which
            are no JSON, give 0.0 as well.
    """
    if fenced:
        blocks = _FENCE.findall(text)
        if not blocks:
            return 0.0
        text = blocks[-1]
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    return float(_validator(json.dumps(schema, sort_keys=True)).is_valid(value))


def check_json_schema(schema: Mapping[str, Any] | None = None, fenced: bool = False) -> None:
    """Raise ValueError where ``schema`` is missing, or is no schema."""
    import jsonschema

    if schema is None:
        raise ValueError("reward json_schema needs options: {schema: a JSON schema}")
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"reward json_schema: the schema is wrong: {error.message}") from None


@lru_cache(maxsize=8)
def _validator(schema: str) -> Any:
    import jsonschema
    from referencing import Registry

    # A registry of our own: the default one fetches what a `$ref` names from the network.
    return jsonschema.Draft202012Validator(json.loads(schema), registry=Registry())


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
