"""Weights and trainer state in the store: safetensors and JSON, nothing that could run code.

A snapshot is whole tensors under Hugging Face names, so it loads on any number of ranks:

    weights-00000.<sha256>.safetensors     float32 master weights
    exp_avg-00000.<sha256>.safetensors     AdamW's first moment; exp_avg_sq: its second
    state.<sha256>.json                    {"step": steps finished, "taken": those not skipped}
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy

from artifacts.manifests import Manifest, Ref, Shard, read_manifest
from artifacts.shards import read_file, write_file
from artifacts.store import Store

KINDS = ("weights", "exp_avg", "exp_avg_sq")
_FILE_BYTES = 512 << 20


@dataclass(frozen=True)
class Snapshot:
    """Full trainer state: for each kind, tensor name to array; and the plain numbers."""

    tensors: Mapping[str, Mapping[str, np.ndarray]]
    state: Mapping[str, Any]


def write_snapshot(store: Store, folder: str, snapshot: Snapshot) -> list[Shard]:
    """Write the files of ``snapshot`` in ``folder``; its manifest is for the caller to commit."""
    shards = []
    for kind in KINDS:
        for index, part in enumerate(_parts(snapshot.tensors[kind])):
            data = safetensors.numpy.save(part)
            shards.append(
                write_file(store, folder, f"{kind}-{index:05d}", "safetensors", data, len(part))
            )
    data = json.dumps(snapshot.state, sort_keys=True).encode()
    return [*shards, write_file(store, folder, "state", "json", data, 1)]


def read_snapshot(store: Store, ref: Ref) -> Snapshot:
    """All of a committed snapshot, checked."""
    manifest = read_manifest(store, ref.path, ref.digest)
    tensors = {kind: read_tensors(store, ref.path, manifest, kind) for kind in KINDS}
    (state,) = (shard for shard in manifest.shards if shard.name.startswith("state."))
    return Snapshot(tensors, json.loads(read_file(store, ref.path, state)))


def read_tensors(store: Store, folder: str, manifest: Manifest, kind: str) -> dict[str, np.ndarray]:
    """The tensors of one kind, by Hugging Face name."""
    tensors: dict[str, np.ndarray] = {}
    for shard in manifest.shards:
        if shard.name.startswith(f"{kind}-"):
            tensors |= safetensors.numpy.load(read_file(store, folder, shard))
    return tensors


def _parts(tensors: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    part: dict[str, np.ndarray] = {}
    for name in sorted(tensors):
        if part and sum(a.nbytes for a in part.values()) + tensors[name].nbytes > _FILE_BYTES:
            yield part
            part = {}
        part[name] = tensors[name]
    yield part
