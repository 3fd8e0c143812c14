"""Removal of what the kept policies don't need: first what would go, then its removal.

Manifests are never removed: small as they are, they are the chain of keys and digests by which a
run resumes, and what an auditor reads. What goes are shards, and files that no manifest names.

The order is that of the store turned round: the tombstone is written, then the bytes go. A
collection that is interrupted anywhere leaves every manifest with its bytes or with a tombstone,
and the next one finishes it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from artifacts.keep_rules import KEEP_ALL, Rule
from artifacts.listing import Upload, abort, uploads, walk, walk_inherited
from artifacts.manifests import FILE_NAME, Manifest
from artifacts.orphans import Orphan, orphans
from artifacts.pins import Pin, read_pins
from artifacts.retention import Catalog, needed, read_catalog, rebuildable, versions_within_reach
from artifacts.store import Store
from artifacts.tombstones import read_tombstone, write_tombstone


class PinsChangedError(RuntimeError):
    """What is pinned changed while a collection ran."""


@dataclass(frozen=True)
class Retirement:
    """A commit whose shards go.

    Attributes:
        files: bytes of those that are still there, by path.
        rule: what kept others and not this; of a collection to be finished, its own.
    """

    folder: str
    manifest: Manifest
    files: Mapping[str, int]
    rule: str


@dataclass(frozen=True)
class Collection:
    """What would go. ``kept``: versions of the policies that stay within reach."""

    kept: Sequence[int]
    pins: Sequence[Pin]
    retirements: Sequence[Retirement]
    orphans: Sequence[Orphan]
    uploads: Sequence[Upload]

    def lines(self) -> Iterator[tuple[str, int, str]]:
        """Path, bytes and reason of every file that would go, and of every unfinished upload."""
        for each in self.retirements:
            why = f"no policy that is kept needs it ({each.rule})"
            yield from ((path, size, why) for path, size in each.files.items())
        yield from ((orphan.path, orphan.bytes, orphan.why) for orphan in self.orphans)
        yield from ((up.path, up.bytes, "an upload that never ended") for up in self.uploads)


def plan_collection(
    store: Store, rules: Sequence[Rule] = (KEEP_ALL,), is_held: bool = True
) -> Collection:
    """What no kept policy needs, of the run's own files.

    Where the run ``is_held``, its newest lease is this process's own. Else it is one that will be
    over by the time that anything is removed.

    Raises:
        RuleError: a rule asks for what there is not.
        IntegrityError: a manifest, a tombstone or a pin can't be read.
    """
    files = walk(store)
    catalog = read_catalog(store, {*walk_inherited(store), *files})
    pins = read_pins(store)
    stays = needed(catalog, _chosen(catalog, rules), pins) - catalog.retired
    going = [f for f in catalog.manifests if f"{f}/{FILE_NAME}" in files and f not in stays]
    retirements = [_retirement(store, catalog, f, files, _rule_of(rules)) for f in going]
    return Collection(
        kept=rebuildable(replace(catalog, retired=catalog.retired | {*going})),
        pins=pins,
        retirements=[each for each in retirements if each.files],
        orphans=list(orphans(catalog, files, is_held)),
        uploads=list(uploads(store)),
    )


def collect(store: Store, collection: Collection) -> None:
    """Remove what ``collection`` lists. The caller holds the run, and made the plan while it did.

    The pins are read again before each tombstone: what is pinned while a collection runs stays,
    and who pins it a moment too late finds the tombstone (see :mod:`artifacts.pins`).

    Raises:
        PinsChangedError: a pin came or went; what was removed so far was rightly removed.
    """
    for retirement in collection.retirements:
        store.guard()
        if read_pins(store) != collection.pins:
            raise PinsChangedError(f"a pin of {store.url} came or went meanwhile: run gc again")
        write_tombstone(store, retirement.folder, retirement.manifest, retirement.rule)
        for path in retirement.files:
            store.remove(path)
    for orphan in collection.orphans:
        store.guard()
        store.remove(orphan.path)
    for upload in collection.uploads:
        store.guard()
        abort(store, upload)


def _chosen(catalog: Catalog, rules: Sequence[Rule]) -> set[int]:
    if KEEP_ALL in rules:
        return set(catalog.updates)
    versions = versions_within_reach(catalog)
    return {version for rule in rules for version in rule.choose(versions)}


def _rule_of(rules: Sequence[Rule]) -> str:
    return f"keep {', '.join(rule.text for rule in rules)}"


def _retirement(
    store: Store, catalog: Catalog, folder: str, files: Mapping[str, int], rule: str
) -> Retirement:
    manifest = catalog.manifests[folder]
    if folder in catalog.retired and (tombstone := read_tombstone(store, folder)):
        rule = tombstone.rule
    paths = [f"{folder}/{shard.name}" for shard in manifest.shards]
    return Retirement(folder, manifest, {p: files[p] for p in paths if p in files}, rule)
