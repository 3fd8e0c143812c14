"""The record whose presence is the commit.

A manifest has two parts. *Content* says what was made out of what: its digest is what later
stages' keys chain on, so two undisturbed runs, or a killed and resumed one, agree on it.
*Provenance* says how it came about (code revision, host, seconds) and stays outside every digest.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from artifacts.errors import AlreadyExistsError, IntegrityError, NotCommittedError
from artifacts.keys import key_of
from artifacts.store import Store, is_inside, is_name

SCHEMA_VERSION = 1
FILE_NAME = "manifest.json"


@dataclass(frozen=True)
class Shard:
    """One file of a manifest: ``rows`` is table rows, or tensors for a weight file."""

    name: str
    rows: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class Ref:
    """A committed manifest: the folder it lies in, and its content digest.

    The run's base model, which lies outside the run, has the path ``model``.
    """

    path: str
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What a stage committed. See the module's docstring for the two parts.

    Attributes:
        kind: what the shards hold: prompts, rollouts, scores, update, policy, evaluation.
        stage, stage_version, key: whose work this is, and the digest of what determined it.
        identity: the resolved config fields that change numbers.
        functions: user functions by import path, each with its source digest.
        inputs: manifests that were read, by name.
        shards: the files, in order.
        outcome: facts that later stages decide on, such as the next prompt position.
        metrics: numbers for people; never a time.
        provenance: everything else, outside the digest.
    """

    kind: str
    stage: str
    stage_version: int
    key: str
    identity: Mapping[str, Any]
    functions: Mapping[str, str]
    inputs: Mapping[str, Ref]
    shards: tuple[Shard, ...]
    outcome: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows over all shards."""
        return sum(shard.rows for shard in self.shards)

    def content(self) -> dict[str, Any]:
        """The digested part, as JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": self.kind,
            "stage": self.stage,
            "stage_version": self.stage_version,
            "key": self.key,
            "identity": dict(self.identity),
            "functions": dict(self.functions),
            "inputs": {name: vars(ref) for name, ref in self.inputs.items()},
            "shards": [vars(shard) for shard in self.shards],
            "totals": {"rows": self.rows, "bytes": sum(shard.bytes for shard in self.shards)},
            "outcome": dict(self.outcome),
            "metrics": {name: _to_json(value) for name, value in self.metrics.items()},
        }

    @property
    def digest(self) -> str:
        """Content digest, 64 hex digits."""
        return key_of(self.content())


def write_manifest(store: Store, folder: str, manifest: Manifest) -> Manifest:
    """Commit ``manifest`` in ``folder``; returns what a reader finds there afterwards.

    A second commit of equal content is no conflict: the first one's manifest is returned.

    Raises:
        IntegrityError: another manifest of different content is committed there.
        LeaseLostError: the run that this process held is another's by now; nothing is written.
    """
    content = manifest.content()
    body = {"content": content, "digest": key_of(content), "provenance": manifest.provenance}
    data = json.dumps(body, sort_keys=True, indent=1, ensure_ascii=False).encode()
    store.guard()
    try:
        store.create(f"{folder}/{FILE_NAME}", data)
    except AlreadyExistsError:
        return _settle(manifest, read_manifest(store, folder), folder)
    # Through JSON, so that whoever made it holds what whoever finds it will: lists, not tuples.
    written = json.loads(data)
    return _from_content(written["content"], written["provenance"])


def _settle(ours: Manifest, theirs: Manifest, folder: str) -> Manifest:
    if ours.digest != theirs.digest:
        path = f"{folder}/{FILE_NAME}"
        raise IntegrityError(path, ours.digest, theirs.digest, "content digest of a second commit")
    return theirs


def read_manifest(store: Store, folder: str, digest: str | None = None) -> Manifest:
    """The manifest committed in ``folder``, checked against its own digest and ``digest``.

    Raises:
        NotCommittedError: there is none.
        IntegrityError: its content is not what its digest, or ``digest``, says; or it names
            something that does not lie in the run.
        ValueError: it was written by a later version of the schema.
    """
    path = f"{folder}/{FILE_NAME}"
    try:
        data = store.read(path)
    except FileNotFoundError as error:
        raise NotCommittedError(f"{store.url}/{path}: not committed") from error
    try:
        body = json.loads(data)
        content, stated, provenance = body["content"], body["digest"], body["provenance"]
        version = int(content["schema_version"])
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(path, "a manifest", f"{error!r} on reading it", "content") from error
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"{store.url}/{path} has schema version {version}, and this version "
            f"of Ratchet reads up to {SCHEMA_VERSION}: read it with the version that wrote it"
        )
    found = _content_digest(path, content)
    for expected in (stated, digest or found):
        if expected != found:
            raise IntegrityError(path, expected, found, "content digest")
    try:
        return _from_content(content, provenance)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise IntegrityError(path, "a manifest", str(error), "content") from error


def _content_digest(path: str, content: Mapping[str, Any]) -> str:
    try:
        return key_of(content)
    except ValueError as error:  # NaN, which Python's JSON reads and no manifest holds
        raise IntegrityError(path, "a manifest", str(error), "content") from error


def _from_content(content: Mapping[str, Any], provenance: Mapping[str, Any]) -> Manifest:
    return Manifest(
        kind=content["kind"],
        stage=content["stage"],
        stage_version=content["stage_version"],
        key=content["key"],
        identity=content["identity"],
        functions=content["functions"],
        inputs={name: _ref(ref) for name, ref in content["inputs"].items()},
        shards=tuple(shard_of(shard) for shard in content["shards"]),
        outcome=content["outcome"],
        metrics={name: _from_json(value) for name, value in content["metrics"].items()},
        provenance=provenance,
    )


def shard_of(record: Mapping[str, Any]) -> Shard:
    """The shard that ``record``, read from a store, describes.

    Raises:
        ValueError: it is no record of a file directly in its manifest's folder.
    """
    shard = Shard(**record)
    if not is_name(shard.name):
        raise ValueError(f"{shard.name!r} is no name of a file in its manifest's folder")
    counts = (shard.rows, shard.bytes)
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError(f"{shard.name} has rows and bytes {counts}, which are no counts")
    return shard


def _ref(record: Mapping[str, Any]) -> Ref:
    ref = Ref(**record)
    if not is_inside(ref.path):
        raise ValueError(f"{ref.path!r} is no path inside the run")
    return ref


def _to_json(value: float | None) -> float | str | None:
    # JSON has no NaN; a diverged loss is still a fact worth keeping.
    return str(float(value)) if value is not None and not math.isfinite(value) else value


def _from_json(value: float | str | None) -> float | None:
    return float(value) if isinstance(value, str) else value
