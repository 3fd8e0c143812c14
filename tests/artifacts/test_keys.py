"""Keys: the same for the same work anywhere, and another for any other."""

import importlib.util
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.keys import canonical, key_of, source_digest
from child import run_child

VALUE = {"b": [1, 1.5, True, None], "a": {"☃": "text", "0": -0.0}, "c": 10**30, "d": 1e22}
# By another road: written out by hand.
VALUE_TEXT = (
    '{"a":{"0":0.0,"☃":"text"},"b":[1,1.5,true,null],"c":1000000000000000000000000000000,"d":1e+22}'
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(codec="utf-8"))
    # A negative zero is a zero to a key.
    | st.floats(allow_nan=False, allow_infinity=False).map(lambda number: number + 0.0),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=10,
)


def test_canonical_of_a_value_is_sorted_json_without_spaces() -> None:
    assert canonical(VALUE).decode() == VALUE_TEXT


KEYED = """
from artifacts.keys import key_of
names = {"alpha", "beta", "gamma", "delta"}  # in the order of this process's hashes
print(key_of({name: {"n": len(name), "x": 0.1} for name in names}))
"""


def test_key_in_two_processes_with_other_hash_seeds_is_equal(tmp_path: Path) -> None:
    keys = {
        run_child(KEYED, PYTHONHASHSEED="1", TZ="UTC"),
        run_child(KEYED, PYTHONHASHSEED="2", TZ="Asia/Tokyo", cwd=tmp_path),
        run_child(KEYED, PYTHONHASHSEED="3", LC_ALL="C", HOME=str(tmp_path)),
    }
    assert len(keys) == 1


def test_key_is_blind_to_the_order_of_mappings_and_to_their_type() -> None:
    turned = OrderedDict(reversed(VALUE.items()))
    assert key_of(turned) == key_of(VALUE)


def test_key_takes_a_tuple_for_a_list() -> None:
    assert key_of({"betas": (0.9, 0.999)}) == key_of({"betas": [0.9, 0.999]})


def test_key_of_one_in_each_type_differs() -> None:
    ones: list[Any] = [1, 1.0, True, "1", [1], {"1": 1}, None]
    assert len({key_of({"x": one}) for one in ones}) == len(ones)


def test_key_of_negative_zero_is_that_of_zero() -> None:
    assert key_of({"x": [-0.0]}) == key_of({"x": [0.0]})
    assert key_of(0.0) != key_of(0)


@given(VALUES, VALUES)
def test_key_of_two_values_is_equal_only_for_equal_json(one: Any, other: Any) -> None:
    assert (key_of(one) == key_of(other)) == (_typed(one) == _typed(other))


def _typed(value: Any) -> Any:
    """``value`` such that ``==`` tells 1, 1.0 and True apart, by tagging each with its type."""
    if isinstance(value, dict):
        return ("dict", sorted((name, _typed(item)) for name, item in value.items()))
    if isinstance(value, list):
        return ("list", [_typed(item) for item in value])
    return (type(value).__name__, repr(value))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_key_of_a_number_that_is_not_finite_is_refused_by_place(number: float) -> None:
    with pytest.raises(ValueError, match=r"value\.update\.betas\[1\] is "):
        key_of({"update": {"betas": [0.9, number]}})


@pytest.mark.parametrize(
    ("thing", "name"),
    [
        (threading.Lock(), "lock"),
        (Path("a"), "Path"),
        (b"bytes", "bytes"),
        ({"a", "b"}, "set"),
        (object(), "object"),
        (len, "builtin"),
        (1j, "complex"),
    ],
)
def test_key_of_a_thing_without_stable_bytes_is_refused_by_place(thing: Any, name: str) -> None:
    for seed in (1, 2):
        with pytest.raises(TypeError, match=rf"value\.inner\[0\]\.handle is a .*{name}"):
            key_of({"seed": seed, "inner": [{"handle": thing}]})


def test_key_of_an_open_file_is_refused_by_place(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w") as file, pytest.raises(TypeError, match=r"value\.log is a"):
        key_of({"log": file})


def test_key_of_a_mapping_with_other_keys_than_strings_is_refused_by_place() -> None:
    with pytest.raises(TypeError, match=r"value\.table has the key 1"):
        key_of({"table": {1: "x"}})


SOURCE = """
WEIGHT = 1

def exact(text, **others):
    return WEIGHT * float(text == "yes")

def other(text, **others):
    return 0.0

def wrap(function):
    return function

class Callable:
    def __call__(self, text):
        return 1.0
"""


def load(path: Path, source: str = SOURCE) -> Any:
    """The module that ``source`` is, as a file at ``path``."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_source_digest_of_a_copied_file_is_the_same(tmp_path: Path) -> None:
    here, there = (load(tmp_path / folder / "rewards.py") for folder in ("here", "there"))
    assert source_digest(here.exact) == source_digest(there.exact)


def test_source_digest_tells_functions_of_one_file_apart(tmp_path: Path) -> None:
    module = load(tmp_path / "rewards.py")
    assert source_digest(module.exact) != source_digest(module.other)


@pytest.mark.parametrize(
    ("old", "new"), [('"yes"', '"no"'), ("WEIGHT = 1", "WEIGHT = 2"), ("return 0.0", "return 0.5")]
)
def test_source_digest_changes_with_the_function_and_its_neighbours(
    tmp_path: Path, old: str, new: str
) -> None:
    before = load(tmp_path / "before" / "rewards.py")
    after = load(tmp_path / "after" / "rewards.py", SOURCE.replace(old, new))
    assert source_digest(before.exact) != source_digest(after.exact)


@pytest.mark.parametrize(
    "make", [lambda m: len, lambda m: partial(m.exact), lambda m: m.Callable()]
)
def test_source_digest_of_what_has_no_source_file_is_refused(
    tmp_path: Path, make: Callable[[Any], Any]
) -> None:
    with pytest.raises(TypeError, match="no source file"):
        source_digest(make(load(tmp_path / "rewards.py")))
