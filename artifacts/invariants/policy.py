"""Policies: a snapshot's parts are all there, and are those after the update that it names."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from artifacts.invariants.inputs import last_step, policy_of
from artifacts.manifests import Manifest
from artifacts.shards import read_file
from artifacts.store import Store

_PARTS = ("weights", "exp_avg", "exp_avg_sq")


def problems(
    store: Store, folder: str, manifest: Manifest, tables: Sequence[pa.Table | None]
) -> Iterator[str]:
    """See the package's docstring."""
    stems = {shard.name.partition(".")[0].partition("-")[0] for shard in manifest.shards}
    critic = [f"critic_{part}" for part in _PARTS if "critic_digest" in manifest.identity]
    missing = [part for part in (*_PARTS, *critic) if part not in stems]
    if missing:
        yield f"it has no {missing[0]}"
    update = manifest.inputs.get("update")
    made = policy_of(store, update)
    if made is not None and manifest.identity.get("weights_digest") != made.digest:
        yield f"its weights are not those of {update and update.path}"
    state = _state(store, folder, manifest)
    if state is None:
        yield "it has no state"
        return
    step, taken = state.get("step"), state.get("taken")
    expected = last_step(store, update)
    if expected is not None and step != expected:
        yield f"its state is of step {step}, and its update ended at step {expected}"
    if not (isinstance(step, int) and isinstance(taken, int) and 0 <= taken <= step):
        yield f"its state has {taken} steps taken of {step}"


def _state(store: Store, folder: str, manifest: Manifest) -> dict[str, Any] | None:
    for shard in manifest.shards:
        if shard.name.startswith("state."):
            state = json.loads(read_file(store, folder, shard))
            return state if isinstance(state, dict) else None
    return None
