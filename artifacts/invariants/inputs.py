"""What invariants read of an artifact's inputs; None where the manifest names none, or it fails."""

from dataclasses import dataclass

import pyarrow as pa

from artifacts.invariants.columns import distinct
from artifacts.manifests import Manifest, Ref, read_manifest
from artifacts.shards import read_shard, read_table
from artifacts.store import Store


@dataclass(frozen=True)
class Policy:
    """Weights that something was made with: updates behind them, and their digest."""

    version: int
    digest: str


def policy_of(store: Store, ref: Ref | None) -> Policy | None:
    """The policy that ``ref`` names: the base model, or the one that an update made."""
    if ref is None:
        return None
    if ref.path == "model":
        return Policy(0, ref.digest)
    manifest = _manifest(store, ref)
    if manifest is None or "weights_digest" not in manifest.outcome:
        return None
    return Policy(int(manifest.outcome["policy_version"]), manifest.outcome["weights_digest"])


def table_of(store: Store, ref: Ref | None) -> pa.Table | None:
    """All rows of the artifact that ``ref`` names."""
    manifest = _manifest(store, ref)
    try:
        return None if ref is None or manifest is None else read_table(store, ref.path, manifest)
    except (OSError, ValueError):
        return None


def last_step(store: Store, ref: Ref | None) -> int | None:
    """The last optimizer step of the update that ``ref`` names; 0 for the base model."""
    if ref is not None and ref.path == "model":
        return 0
    manifest = _manifest(store, ref)
    if ref is None or manifest is None:
        return None
    for shard in manifest.shards:
        if shard.name.startswith("steps."):
            try:
                steps = distinct(read_shard(store, ref.path, shard)["step"])
            except (OSError, ValueError, KeyError):
                return None
            return int(steps[-1]) if steps else None
    return None


def _manifest(store: Store, ref: Ref | None) -> Manifest | None:
    try:
        return None if ref is None else read_manifest(store, ref.path, ref.digest)
    except (OSError, ValueError):
        return None
