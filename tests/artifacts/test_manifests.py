"""Manifests: the commit, and what may and may not be committed twice."""

import json
import math
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from artifacts.errors import (
    AlreadyExistsError,
    IntegrityError,
    NotCommittedError,
    StoreError,
    UrlError,
)
from artifacts.keys import key_of
from artifacts.manifests import Manifest, Ref, Shard, read_manifest, write_manifest
from artifacts.runs import committed, is_committed, iterations
from artifacts.store import Store
from stages.ledger import read_ledger, write_ledger

FOLDER = "iteration-000001/rollout/abc"
PATH = f"{FOLDER}/manifest.json"

MANIFEST = Manifest(
    kind="rollouts",
    stage="rollout",
    stage_version=1,
    key="a" * 64,
    identity={"temperature": 1.0, "stop": ["\n", "☃"], "top_k": 0, "answer": None},
    functions={"exact": "b" * 64},
    inputs={"policy": Ref("policy/000000/x", "c" * 64)},
    shards=(Shard("shard-00000.d.arrow", 40, 1234, "d" * 64), Shard("s.e.arrow", 2, 1, "e" * 64)),
    outcome={"next_position": 8},
    metrics={"loss": 0.25, "samples": 40, "missing": None},
    provenance={"host": "one", "seconds": 1.5},
)

CHANGES: dict[str, Any] = {
    "kind": "scores",
    "stage": "score",
    "stage_version": 2,
    "key": "f" * 64,
    "identity": {"temperature": 0.5},
    "functions": {"exact": "f" * 64},
    "inputs": {"policy": Ref("policy/000000/x", "f" * 64)},
    "shards": MANIFEST.shards[:1],
    "outcome": {"next_position": 9},
    "metrics": {"loss": 0.5},
}


def rewrite(store: Store, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the committed manifest behind everyone's back."""
    body = json.loads(store.read(PATH))
    change(body)
    store.put(PATH, json.dumps(body).encode())


def test_manifest_written_then_read_is_the_same(store: Store) -> None:
    assert not is_committed(store, FOLDER)
    assert write_manifest(store, FOLDER, MANIFEST) == MANIFEST
    assert is_committed(store, FOLDER)
    found = read_manifest(store, FOLDER, MANIFEST.digest)
    assert found == MANIFEST
    assert found.digest == MANIFEST.digest
    assert found.rows == 42


def test_manifest_not_there_is_not_committed(store: Store) -> None:
    with pytest.raises(NotCommittedError, match=f"{PATH}: not committed"):
        read_manifest(store, FOLDER)


def test_manifest_of_a_half_written_folder_is_not_committed(store: Store) -> None:
    store.put(f"{FOLDER}/shard-00000.d.arrow", b"whole or not")
    assert not is_committed(store, FOLDER)
    assert committed(store, 1, "rollout") == []
    assert iterations(store) == [1]
    with pytest.raises(NotCommittedError):
        read_manifest(store, FOLDER)


def test_committed_lists_whole_folders_and_passes_over_the_others(store: Store) -> None:
    write_manifest(store, FOLDER, MANIFEST)
    store.put("iteration-000001/rollout/abd/shard-00000.d.arrow", b"of a dead attempt")
    assert committed(store, 1, "rollout") == [(FOLDER, MANIFEST)]


def test_manifest_digest_is_blind_to_provenance() -> None:
    other = replace(MANIFEST, provenance={"host": "two", "seconds": 99.0, "start": 1e9})
    assert other.digest == MANIFEST.digest
    assert "provenance" not in MANIFEST.content()


def test_manifest_digest_is_blind_to_the_order_of_mappings() -> None:
    turned = replace(MANIFEST, identity=dict(reversed(MANIFEST.identity.items())))
    assert turned.digest == MANIFEST.digest


@pytest.mark.parametrize("field", CHANGES)
def test_manifest_digest_changes_with_every_part_of_the_content(field: str) -> None:
    assert replace(MANIFEST, **{field: CHANGES[field]}).digest != MANIFEST.digest


def test_manifest_changes_of_this_test_leave_no_part_out() -> None:
    assert set(CHANGES) == set(vars(MANIFEST)) - {"provenance"}


def test_manifest_committed_twice_with_equal_content_stays_the_first(store: Store) -> None:
    write_manifest(store, FOLDER, MANIFEST)
    before = store.read(PATH)
    again = replace(MANIFEST, provenance={"host": "two"})
    assert write_manifest(store, FOLDER, again).provenance == {"host": "one", "seconds": 1.5}
    assert store.read(PATH) == before


@pytest.mark.parametrize("field", CHANGES)
def test_manifest_committed_twice_with_other_content_is_an_error(store: Store, field: str) -> None:
    write_manifest(store, FOLDER, MANIFEST)
    other = replace(MANIFEST, **{field: CHANGES[field]})
    with pytest.raises(IntegrityError) as caught:
        write_manifest(store, FOLDER, other)
    for part in (PATH, other.digest, MANIFEST.digest):
        assert part in str(caught.value)
    assert read_manifest(store, FOLDER) == MANIFEST


def test_manifest_committed_by_several_at_once_is_one_of_theirs(store: Store) -> None:
    ours = [replace(MANIFEST, provenance={"worker": number}) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda each: write_manifest(store, FOLDER, each), ours))
    standing = read_manifest(store, FOLDER)
    assert standing in ours
    assert results == [standing] * 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 1e-300, 7, None])
def test_manifest_metric_of_any_value_survives(store: Store, value: float | None) -> None:
    written = write_manifest(store, FOLDER, replace(MANIFEST, metrics={"loss": value}))
    found = read_manifest(store, FOLDER, written.digest)
    assert repr(found.metrics["loss"]) == repr(value)
    assert found.digest == written.digest


def test_manifest_identity_with_nan_is_not_committed(store: Store) -> None:
    with pytest.raises(ValueError, match=r"value\.identity\.lr is nan"):
        write_manifest(store, FOLDER, replace(MANIFEST, identity={"lr": math.nan}))
    assert not is_committed(store, FOLDER)


def test_manifest_of_a_later_schema_is_refused_with_both_versions(store: Store) -> None:
    write_manifest(store, FOLDER, MANIFEST)

    def age(body: dict[str, Any]) -> None:
        body["content"]["schema_version"] = 7
        body["digest"] = key_of(body["content"])

    rewrite(store, age)
    with pytest.raises(ValueError, match=r"schema version 7.*reads up to 1") as caught:
        read_manifest(store, FOLDER)
    assert not isinstance(caught.value, IntegrityError)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body["content"]["metrics"].update(loss=0.26),
        lambda body: body["content"]["shards"].pop(),
        lambda body: body["content"]["inputs"]["policy"].update(digest="f" * 64),
        lambda body: body["content"]["metrics"].update(loss=math.nan),
        lambda body: body.update(digest="f" * 64),
        lambda body: body.pop("digest"),
        lambda body: body.pop("content"),
        lambda body: body["content"].pop("schema_version"),
        lambda body: body.update(content=[]),
    ],
)
def test_manifest_changed_after_the_commit_is_refused_by_name(store: Store, change) -> None:
    write_manifest(store, FOLDER, MANIFEST)
    rewrite(store, change)
    with pytest.raises(IntegrityError, match=PATH):
        read_manifest(store, FOLDER)


ESCAPES = [
    "../x",
    "..",
    "a/../../x",
    "/etc/passwd",
    "s3://other/x",
    "file:///etc/passwd",
    "a\\..\\x",
    "a\0b",
    "",
    "a//b",
    "a/",
    7,
    None,
]


def test_manifest_that_names_what_lies_elsewhere_is_refused_before_it_is_touched(
    store: Store,
) -> None:
    write_manifest(store, FOLDER, MANIFEST)
    for name in [*ESCAPES, "sub/shard-00000.d.arrow"]:
        rewrite(store, lambda body, name=name: _redigested(body, "shards", 0, "name", name))
        with pytest.raises(IntegrityError, match=PATH):
            read_manifest(store, FOLDER)
    rewrite(store, lambda body: _redigested(body, "shards", 0, "name", "shard-00000.d.arrow"))
    for path in ESCAPES:
        rewrite(store, lambda body, path=path: _redigested(body, "inputs", "policy", "path", path))
        with pytest.raises(IntegrityError, match=PATH):
            read_manifest(store, FOLDER)
    rewrite(store, lambda body: _redigested(body, "inputs", "policy", "path", "policy/000000/x"))
    assert read_manifest(store, FOLDER) == MANIFEST


def _redigested(body: dict[str, Any], part: str, at: Any, field: str, value: Any) -> None:
    body["content"][part][at][field] = value
    body["digest"] = key_of(body["content"])


@pytest.mark.parametrize(
    ("field", "value"), [("rows", -1), ("bytes", "9"), ("rows", 1.5), ("mode", "pickle")]
)
def test_manifest_with_a_shard_that_is_no_record_of_one_is_refused(
    store: Store, field: str, value: Any
) -> None:
    write_manifest(store, FOLDER, MANIFEST)
    rewrite(store, lambda body: _redigested(body, "shards", 0, field, value))
    with pytest.raises(IntegrityError, match=PATH):
        read_manifest(store, FOLDER)


def test_ledger_that_lies_elsewhere_is_refused(store: Store) -> None:
    kept = write_ledger(store, FOLDER, [{"unit": "shard-00000"}])
    assert [row["unit"] for row in read_ledger(store, FOLDER, kept)] == ["shard-00000"]
    for name in ESCAPES:
        with pytest.raises(IntegrityError, match=PATH):
            read_ledger(store, FOLDER, {**kept, "name": name})
    with pytest.raises(IntegrityError, match=PATH):
        read_ledger(store, FOLDER, {"name": kept["name"]})


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"\0" * 99])
def test_manifest_that_is_no_manifest_is_refused_by_name(store: Store, data: bytes) -> None:
    store.put(PATH, data)
    with pytest.raises(IntegrityError, match=PATH):
        read_manifest(store, FOLDER)


def test_manifest_other_than_the_one_named_is_refused(store: Store) -> None:
    write_manifest(store, FOLDER, MANIFEST)
    with pytest.raises(IntegrityError) as caught:
        read_manifest(store, FOLDER, "f" * 64)
    assert caught.value.expected == "f" * 64
    assert caught.value.found == MANIFEST.digest


@pytest.mark.parametrize(
    "error",
    [
        IntegrityError("a/x", 40, 20, "rows"),
        AlreadyExistsError("a/x exists already"),
        NotCommittedError("a/x: not committed"),
        StoreError("read", "s3://b/x", "TimeoutError", 110),
        StoreError("read", "s3://b/x", "ClientError: gone"),
        UrlError("no such protocol"),
    ],
)
def test_error_pickled_to_a_driver_says_the_same(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
