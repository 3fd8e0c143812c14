"""The contract of every stage: find what is committed, or make it and commit it.

A stage describes its work before doing it. The description's key is the digest of everything that
determines the result, so the same work is found wherever and whenever it was done.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from artifacts.attempts import begin_attempt
from artifacts.errors import IntegrityError, NotCommittedError
from artifacts.keys import key_of
from artifacts.manifests import Manifest, Ref, Shard, read_manifest, write_manifest
from artifacts.runs import stage_folder
from artifacts.store import Store
from artifacts.tombstones import FILE_NAME as TOMBSTONE
from artifacts.tombstones import is_retired

Progress = Callable[..., None]


class StageError(RuntimeError):
    """A stage's work failed, in a way that its message explains to a person."""


@dataclass(frozen=True)
class Work:
    """What a stage is about to do, all that determines its result, and where that will lie."""

    kind: str
    stage: str
    version: int
    iteration: int
    identity: Mapping[str, Any]
    inputs: Mapping[str, Ref]
    functions: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Digest of the identity: not of paths, times, hosts or degrees of parallelism."""
        return key_of(
            {
                "stage": self.stage,
                "version": self.version,
                "iteration": self.iteration,
                "identity": dict(self.identity),
                "functions": dict(self.functions),
                "inputs": {name: ref.digest for name, ref in self.inputs.items()},
            }
        )

    @property
    def folder(self) -> str:
        """Where the output lies in the run."""
        return stage_folder(self.stage, self.key, self.iteration)


@dataclass(frozen=True)
class Product:
    """What doing the work gave: the manifest's variable parts."""

    shards: list[Shard]
    outcome: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Committed:
    """A stage's committed output, and whether this call made it."""

    folder: str
    manifest: Manifest
    was_reused: bool

    @property
    def ref(self) -> Ref:
        """What a later stage names as its input."""
        return Ref(self.folder, self.manifest.digest)


def find(store: Store, work: Work) -> Committed | None:
    """The committed output of ``work``, if there is one.

    Its manifest is checked, and that its files are there in their sizes; their digests are
    checked by whoever reads them. An output whose files ``ratchet gc`` retired is committed all
    the same: it was made, and is never made again.

    Raises:
        IntegrityError: a committed file is missing or cut short.
    """
    try:
        manifest = read_manifest(store, work.folder)
    except NotCommittedError:
        return None
    if manifest.key != work.key:  # the folder's name holds only its beginning
        raise IntegrityError(work.folder, work.key, manifest.key, "key")
    sizes = store.sizes(work.folder)
    for shard in () if TOMBSTONE in sizes else manifest.shards:
        path = f"{work.folder}/{shard.name}"
        found = sizes[shard.name] if shard.name in sizes else store.size(path)
        if found is None and is_retired(store, work.folder):
            break
        if found != shard.bytes:
            raise IntegrityError(path, shard.bytes, "no file" if found is None else found, "bytes")
    return Committed(work.folder, manifest, was_reused=True)


def find_or_make(store: Store, work: Work, make: Callable[[], Product]) -> Committed:
    """The committed output of ``work``: found, else made by ``make`` and committed.

    Raises:
        IntegrityError: what is committed isn't whole; nothing is overwritten.
        LeaseLostError: the run that this process held is another's by now.
    """
    if found := find(store, work):
        return found
    store.guard()  # before hours of work, and once more before they are committed
    start, attempt = time.time(), begin_attempt(store, work.folder)
    product = make()
    manifest = Manifest(
        kind=work.kind,
        stage=work.stage,
        stage_version=work.version,
        key=work.key,
        identity=work.identity,
        functions=work.functions,
        inputs=work.inputs,
        shards=tuple(product.shards),
        outcome=product.outcome,
        metrics=product.metrics,
        provenance={**origin(start), "attempt": attempt, **product.provenance},
    )
    return Committed(work.folder, write_manifest(store, work.folder, manifest), was_reused=False)


def origin(start: float) -> dict[str, Any]:
    """Where and when work that began at ``start`` (Unix seconds) was done."""
    end = time.time()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "start": start,
        "end": end,
        "seconds": end - start,
    }
