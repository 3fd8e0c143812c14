"""Weights and trainer state in the store: safetensors and JSON, nothing that could run code.

A snapshot is whole tensors under Hugging Face names, so it loads on any number of ranks:

    weights-00000.<sha256>.safetensors     float32 master weights
    exp_avg-00000.<sha256>.safetensors     AdamW's first moment; exp_avg_sq: its second
    critic_weights-00000.…                 the critic's, where there is one; and its moments
    state.<sha256>.json                    {"step": steps finished, "taken": those not skipped,
                                            "critic": its own, where there is one}
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
_CRITIC = "critic_"
_FILE_BYTES = 512 << 20


@dataclass(frozen=True)
class Snapshot:
    """Full trainer state: for each kind, tensor name to array; and the plain numbers.

    ``critic`` is the same of the critic: of a snapshot that was read, see :func:`read_critic`.
    """

    tensors: Mapping[str, Mapping[str, np.ndarray]]
    state: Mapping[str, Any]
    critic: "Snapshot | None" = None


def write_snapshot(store: Store, folder: str, snapshot: Snapshot) -> list[Shard]:
    """Write the files of ``snapshot`` in ``folder``; its manifest is for the caller to commit."""
    shards, state = list(_write_tensors(store, folder, "", snapshot)), dict(snapshot.state)
    if snapshot.critic is not None:
        shards += _write_tensors(store, folder, _CRITIC, snapshot.critic)
        state["critic"] = dict(snapshot.critic.state)
    data = json.dumps(state, sort_keys=True).encode()
    return [*shards, write_file(store, folder, "state", "json", data, 1)]


def read_snapshot(store: Store, ref: Ref) -> Snapshot:
    """The policy's part of a committed snapshot, checked, and all of its plain numbers."""
    manifest = read_manifest(store, ref.path, ref.digest)
    return Snapshot(_read_kinds(store, ref, manifest, ""), _read_state(store, ref, manifest))


def read_critic(store: Store, ref: Ref) -> Snapshot | None:
    """The critic's part of a committed snapshot, checked; None where it has none."""
    manifest = read_manifest(store, ref.path, ref.digest)
    state = _read_state(store, ref, manifest).get("critic")
    if state is None:
        return None
    return Snapshot(_read_kinds(store, ref, manifest, _CRITIC), state)


def _write_tensors(store: Store, folder: str, prefix: str, part: Snapshot) -> Iterator[Shard]:
    for kind in KINDS:
        for index, tensors in enumerate(_parts(part.tensors[kind])):
            stem, data = f"{prefix}{kind}-{index:05d}", safetensors.numpy.save(tensors)
            yield write_file(store, folder, stem, "safetensors", data, len(tensors))


def _read_kinds(
    store: Store, ref: Ref, manifest: Manifest, prefix: str
) -> dict[str, dict[str, np.ndarray]]:
    return {kind: read_tensors(store, ref.path, manifest, f"{prefix}{kind}") for kind in KINDS}


def _read_state(store: Store, ref: Ref, manifest: Manifest) -> dict[str, Any]:
    (state,) = (shard for shard in manifest.shards if shard.name.startswith("state."))
    return dict(json.loads(read_file(store, ref.path, state)))


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
