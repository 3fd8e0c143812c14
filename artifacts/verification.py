"""Everything that is committed in a run, recomputed: digests, row counts, inputs, invariants."""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from artifacts.errors import IntegrityError
from artifacts.invariants import problems_of
from artifacts.manifests import Manifest, Ref, Shard, read_manifest
from artifacts.runs import is_committed
from artifacts.shards import read_file, read_shard
from artifacts.store import Store
from artifacts.tombstones import read_tombstone


@dataclass(frozen=True)
class Verification:
    """What was looked at, and what is wrong with it.

    Attributes:
        retired: how many of the manifests have had their files removed by ``ratchet gc``.
        files, bytes: of the others.
    """

    manifests: int
    retired: int
    files: int
    bytes: int
    problems: list[str]


def verify(store: Store) -> Verification:
    """Read every committed byte of the run that is to be there, and check it."""
    num_retired = num_files = num_bytes = 0
    folders = list(committed_folders(store))
    problems: list[str] = []
    for folder in folders:
        # What a parent made from, a child need not have.
        owner = store.owner(folder)
        try:
            manifest = read_manifest(owner, folder)
            is_retired = _is_retired(owner, folder, manifest)
        except ValueError as error:
            problems.append(str(error))
            continue
        if is_retired:
            num_retired += 1
            problems += _problems_of_inputs(owner, folder, manifest)
            continue
        num_files += len(manifest.shards)
        num_bytes += sum(shard.bytes for shard in manifest.shards)
        problems += _problems_of(owner, folder, manifest)
    return Verification(len(folders), num_retired, num_files, num_bytes, problems)


def committed_folders(store: Store) -> Iterator[str]:
    """Every folder of the run that holds a manifest."""
    for top in store.names(""):
        if top == "prompts":
            parents = [top]
        elif top == "policy" or top.startswith(("iteration-", "evaluation-")):
            parents = [f"{top}/{name}" for name in store.names(top)]
        else:
            continue
        for parent in parents:
            folders = (f"{parent}/{name}" for name in store.names(parent))
            yield from (folder for folder in folders if is_committed(store, folder))


def _is_retired(store: Store, folder: str, manifest: Manifest) -> bool:
    tombstone = read_tombstone(store, folder)
    if tombstone is not None and tombstone.files != manifest.shards:
        raise IntegrityError(folder, "those of its manifest", "others", "retired files")
    return tombstone is not None


def _problems_of_inputs(store: Store, folder: str, manifest: Manifest) -> Iterator[str]:
    for name, ref in manifest.inputs.items():
        yield from _input_problems(store, folder, name, ref)


def _problems_of(store: Store, folder: str, manifest: Manifest) -> Iterator[str]:
    yield from _problems_of_inputs(store, folder, manifest)
    tables = []
    for shard in manifest.shards:
        try:
            tables.append(_read(store, folder, shard))
        except ValueError as error:
            yield str(error)
    if len(tables) == len(manifest.shards):
        try:
            for problem in problems_of(store, folder, manifest, tables):
                yield f"{folder}: {problem}"
        except (ValueError, KeyError, TypeError) as error:
            yield f"{folder}: its content is not of kind {manifest.kind}: {error!r}"


def _read(store: Store, folder: str, shard: Shard) -> pa.Table | None:
    if shard.name.endswith(".arrow"):
        return read_shard(store, folder, shard)
    read_file(store, folder, shard)
    return None


def _input_problems(store: Store, folder: str, name: str, ref: Ref) -> Iterator[str]:
    if ref.path in ("model", "critic"):  # lies outside the run; checked when it is loaded
        return
    try:
        read_manifest(store, ref.path, ref.digest)
    except (OSError, ValueError) as error:
        yield f"{folder}: its input {name}: {error}"
