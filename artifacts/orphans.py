"""Files that no manifest will ever name: what killed and superseded attempts left.

Judged by the run's listing alone. What may still serve is no orphan: nothing of an iteration that
is not finished, and nothing of a kind that is not known here.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from artifacts.attempts import is_attempt
from artifacts.lease import FOLDER as LEASES
from artifacts.listing import TEMPORARY
from artifacts.manifests import FILE_NAME, Manifest, Shard
from artifacts.retention import Catalog
from artifacts.tombstones import FILE_NAME as TOMBSTONE

_SHARD_FIELDS = {field.name for field in fields(Shard)}


@dataclass(frozen=True)
class Orphan:
    """A file to remove, and why."""

    path: str
    bytes: int
    why: str


def orphans(catalog: Catalog, files: Mapping[str, int], is_held: bool) -> Iterator[Orphan]:
    """The orphans among a run's own ``files``. ``is_held``: the newest lease is not over."""
    yield from _old_leases(files, is_held)
    for folder, names in _stage_folders(files).items():
        rest = [name for name in names if not name.startswith(TEMPORARY)]
        reasons = {
            name: "half-written by a writer that has ended" for name in names if name not in rest
        }
        if FILE_NAME in rest:
            named = _named(catalog.manifests[folder])
            reasons |= {n: "no manifest names it" for n in rest if not _is_record(n, named)}
        elif why := _why_abandoned(catalog, folder):
            reasons |= dict.fromkeys(rest, why)
        for name, why in sorted(reasons.items()):
            yield Orphan(f"{folder}/{name}", files[f"{folder}/{name}"], why)


def _stage_folders(files: Mapping[str, int]) -> dict[str, list[str]]:
    """Names of the files in each folder of a stage's output."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in files:
        folder, _, name = path.rpartition("/")
        top, *below = folder.split("/")
        is_iteration = top.startswith(("iteration-", "evaluation-")) or top == "policy"
        if (is_iteration and len(below) == 2) or (top == "prompts" and len(below) == 1):
            found[folder].append(name)
    return found


def _is_record(name: str, named: set[str]) -> bool:
    return name in (FILE_NAME, TOMBSTONE) or name in named or is_attempt(name)


def _named(manifest: Manifest) -> set[str]:
    """Names of the files that a manifest counts on: shards, and those that provenance records."""
    beside = (
        str(value["name"])
        for value in manifest.provenance.values()
        if isinstance(value, Mapping) and value.keys() == _SHARD_FIELDS
    )
    return {*(shard.name for shard in manifest.shards), *beside}


def _why_abandoned(catalog: Catalog, folder: str) -> str | None:
    """Why nothing will go on with what lies uncommitted in ``folder``; None where it may be."""
    parent, _, _ = folder.rpartition("/")
    top, number = parent.split("/") if "/" in parent else (parent, "")
    if top == "policy":
        # A snapshot is written from its beginning, whatever lies there.
        return "an attempt at a snapshot" if int(number) < catalog.newest else None
    # Of evaluations, several stand side by side, and any may be gone on with.
    if top == "prompts" or top.startswith("evaluation-"):
        return None
    if int(top.removeprefix("iteration-")) > catalog.newest:
        return None
    is_superseded = any(other.rpartition("/")[0] == parent for other in catalog.manifests)
    return "an attempt beside what was committed" if is_superseded else None


def _old_leases(files: Mapping[str, int], is_held: bool) -> Iterator[Orphan]:
    tokens = {
        int(name.removesuffix(".json")): path
        for path in files
        for folder, _, name in [path.rpartition("/")]
        if folder == LEASES and name.removesuffix(".json").isdigit()
    }
    for token in sorted(tokens)[: -1 if is_held else None]:
        yield Orphan(tokens[token], files[tokens[token]], "a lease that is over")
