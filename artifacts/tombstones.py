"""What stands in for bytes that ``ratchet gc`` removed: which files, when, and by which rule.

    iteration-000003/rollout/<key>/
      manifest.json      stays for ever: the chain of keys and digests that a run resumes by
      retired.json       this: written whole before the first byte goes, and never changed

Files that a tombstone names may be there still, where the collection was interrupted. Nobody may
count on them, and the next collection removes them.
"""

import json
from dataclasses import dataclass
from datetime import UTC, datetime

from artifacts.errors import AlreadyExistsError, IntegrityError, RetiredError
from artifacts.manifests import Manifest, Shard
from artifacts.store import Store

FILE_NAME = "retired.json"


@dataclass(frozen=True)
class Tombstone:
    """Files that are gone, or about to go.

    Attributes:
        files: those that the manifest named.
        when: ISO 8601, UTC, by the remover's clock; for people.
        rule: why they went, in words.
    """

    files: tuple[Shard, ...]
    when: str
    rule: str

    @property
    def names(self) -> frozenset[str]:
        """The files' names in their folder."""
        return frozenset(file.name for file in self.files)


def write_tombstone(store: Store, folder: str, manifest: Manifest, rule: str) -> None:
    """Retire all shards of ``manifest``. Where they were retired before, that stands."""
    value = {
        "files": [vars(shard) for shard in manifest.shards],
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "rule": rule,
    }
    data = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False).encode()
    try:
        store.create(f"{folder}/{FILE_NAME}", data)
    except AlreadyExistsError:
        read_tombstone(store, folder)


def read_tombstone(store: Store, folder: str) -> Tombstone | None:
    """The tombstone in ``folder``, or None where nothing was retired.

    Raises:
        IntegrityError: it can't be read.
    """
    path = f"{folder}/{FILE_NAME}"
    try:
        data = store.read(path)
    except FileNotFoundError:
        return None
    try:
        value = json.loads(data)
        files = tuple(Shard(**file) for file in value["files"])
        return Tombstone(files, str(value["when"]), str(value["rule"]))
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(path, "a tombstone", f"{error!r} on reading it", "content") from error


def is_retired(store: Store, folder: str) -> bool:
    """Whether the shards in ``folder`` are gone, or about to go."""
    return store.exists(f"{folder}/{FILE_NAME}")


def refuse_retired(store: Store, folder: str, name: str | None = None) -> None:
    """Raise RetiredError where the shards in ``folder``, or that of ``name``, were retired."""
    tombstone = read_tombstone(store, folder)
    if tombstone is not None and (name is None or name in tombstone.names):
        raise RetiredError(
            f"{store.url}/{folder} was retired by ratchet gc at {tombstone.when} "
            f"({tombstone.rule}): its manifest is kept, its {len(tombstone.files)} files are gone"
        )
