"""Digests of values: what makes two pieces of work the same work.

A key is the sha256 of canonical JSON. Canonical means: the same value gives the same bytes in
any process on any host, blind to the order of a mapping; a value without stable bytes (an open
file, a lock, an object) is refused by name and never left out.

Treatment of numbers: ``1``, ``1.0`` and ``True`` are three different values; ``-0.0`` is
``0.0``; NaN and infinities are refused, as a configuration that holds them is a mistake.
"""

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def sha256(data: bytes | bytearray | memoryview) -> str:
    """Hex digest of ``data``."""
    return hashlib.sha256(data).hexdigest()


def canonical(value: Any) -> bytes:
    """Canonical JSON of ``value``, as UTF-8.

    Raises:
        TypeError: a part of ``value`` has no stable bytes; the message gives its place.
        ValueError: a number is NaN or infinite.
    """
    return json.dumps(
        _plain(value, "value"),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    ).encode()


def key_of(value: Any) -> str:
    """Digest of ``value``'s canonical JSON, 64 hex digits."""
    return sha256(canonical(value))


def _plain(value: Any, place: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{place} is {value}: a key takes finite numbers only")
        return value + 0.0  # -0.0 + 0.0 is 0.0
    if isinstance(value, Mapping):
        return _plain_mapping(value, place)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    raise TypeError(
        f"{place} is a {type(value).__name__}, which has no stable bytes: "
        "a key takes mappings, lists, strings, numbers, booleans and null"
    )


def _plain_mapping(value: Mapping[Any, Any], place: str) -> dict[str, Any]:
    for name in value:
        if not isinstance(name, str):
            raise TypeError(f"{place} has the key {name!r}: a key's mappings are keyed by strings")
    return {name: _plain(item, f"{place}.{name}") for name, item in value.items()}


def source_digest(function: Callable[..., Any]) -> str:
    """Digest of the file that defines ``function``, and of its name.

    The whole file counts, because a function's result depends on its neighbours too.

    Raises:
        TypeError: ``function`` has no source file: a builtin, typed into a shell, or an object
            that is called, whose state no digest would hold.
    """
    try:
        path = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        path = None
    if path is None or not Path(path).is_file():
        raise TypeError(f"{function!r} has no source file to take a digest of")
    return digest_of_source(function.__qualname__, Path(path).read_bytes())


def digest_of_source(name: str, source: bytes) -> str:
    """Digest of the function ``name`` (its ``__qualname__``) in a file of these bytes."""
    return key_of({"name": name, "source": sha256(source)})
