"""Functions that a user names by import path: ``package.module:name``, or ``path/file.py:name``.

Where a function lies is no identity: its source is, and enters keys by its digest
(``artifacts.keys.source_digest``).
"""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from artifacts.keys import digest_of_source, key_of


def is_import_path(value: str) -> bool:
    """Whether ``value`` has the two parts of an import path."""
    return value.count(":") == 1 and all(value.split(":"))


def load_function(path: str, role: str) -> Callable[..., Any]:
    """The function at import path ``path``. ``role`` says in messages what it serves as.

    Raises:
        ValueError: there is none; the message says what was looked for.
    """
    place, name = path.split(":")
    try:
        module = (
            _module_of_file(place, role)
            if place.endswith(".py")
            else importlib.import_module(place)
        )
    except ImportError as error:
        raise ValueError(f"{role} {path!r} can't be imported: {error}") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None or not callable(function):
        have = ", ".join(sorted(n for n, v in vars(module).items() if callable(v) and n[0] != "_"))
        raise ValueError(f"{role} {path!r}: {place} has no function {name!r}; it has {have}")
    return function


def digest_before_import(path: str) -> str | None:
    """What ``artifacts.keys.source_digest`` will say of the function, with none of it run.

    None where only an import can tell: of a package's function, of one that its file takes from
    elsewhere, and of a file that isn't there or can't be read as Python.
    """
    place, name = path.split(":")
    if not place.endswith(".py"):
        return None
    try:
        source = Path(place).read_bytes()
        body = ast.parse(source).body
    except (OSError, SyntaxError, ValueError):
        return None
    plain = (ast.FunctionDef, ast.AsyncFunctionDef)
    owners = [node for node in body if isinstance(node, plain) and node.name == name]
    if len(owners) != 1 or owners[0].decorator_list:
        return None
    return digest_of_source(name, source)


def _module_of_file(place: str, role: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise ValueError(f"{role} file {place!r} does not exist: check the path")
    name = f"ratchet_user_{key_of(str(path))[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{role} file {place!r} fails on import: {error!r}") from error
    return module
