"""Where things lie in a run, and what of it is committed."""

import contextlib
import json
import re
from typing import Any

from artifacts.errors import AlreadyExistsError, NotCommittedError
from artifacts.manifests import FILE_NAME, Manifest, read_manifest
from artifacts.store import Store

RECORD = "run.json"
_ITERATION = re.compile(r"iteration-(\d{6,})")
_EVALUATION = re.compile(r"evaluation-(\d{6,})")


def run_url(store_url: str, name: str) -> str:
    """URL of run ``name`` in the store at ``store_url``."""
    return f"{store_url.rstrip('/')}/{name}"


def iteration_folder(iteration: int) -> str:
    """Folder of all that an iteration's stages make, snapshots excepted."""
    return f"iteration-{iteration:06d}"


def stage_folder(stage: str, key: str, iteration: int) -> str:
    """Folder of a stage's output in an iteration."""
    return f"{iteration_folder(iteration)}/{stage}/{key[:16]}"


def evaluation_folder(version: int) -> str:
    """Folder of all that policy ``version``'s evaluations make."""
    return f"evaluation-{version:06d}"


def evaluated(store: Store) -> list[int]:
    """Versions of the policies whose evaluation left anything, in order."""
    return sorted(
        int(match[1]) for name in store.names("") if (match := _EVALUATION.fullmatch(name))
    )


def evaluations_of(store: Store, version: int) -> list[tuple[str, Manifest]]:
    """Folder and manifest of every evaluation of policy ``version`` that is committed."""
    return _committed_in(store, f"{evaluation_folder(version)}/evaluation")


def prompts_folder(key: str) -> str:
    """Folder of the tokenised data set."""
    return f"prompts/{key[:16]}"


def policy_folder(version: int, key: str) -> str:
    """Folder of policy ``version``'s snapshot, made by the update with ``key``."""
    return f"policy/{version:06d}/{key[:16]}"


def is_committed(store: Store, folder: str) -> bool:
    """Whether ``folder`` holds a manifest."""
    return store.exists(f"{folder}/{FILE_NAME}")


def write_record(store: Store, record: dict[str, Any]) -> None:
    """Write the run's record. Raises AlreadyExistsError where there is one."""
    store.create(RECORD, json.dumps(record, sort_keys=True, indent=1).encode())


def read_record(store: Store) -> dict[str, Any] | None:
    """The run's record, or None where no run lies."""
    try:
        return dict(json.loads(store.read(RECORD)))
    except FileNotFoundError:
        return None


def read_or_write(store: Store, path: str, value: dict[str, Any]) -> dict[str, Any]:
    """Write ``value`` as JSON at ``path``, or read what another process wrote there first."""
    try:
        store.create(path, json.dumps(value, sort_keys=True, indent=1).encode())
    except AlreadyExistsError:
        return dict(json.loads(store.read(path)))
    return value


def iterations(store: Store) -> list[int]:
    """Numbers of the iterations that left anything, in order."""
    return sorted(
        int(match[1]) for name in store.names("") if (match := _ITERATION.fullmatch(name))
    )


def has_commit(store: Store, iteration: int, stage: str) -> bool:
    """Whether ``stage`` has committed anything in ``iteration``."""
    parent = f"{iteration_folder(iteration)}/{stage}"
    return any(is_committed(store, folder) for folder in _folders_in(store, parent))


def committed(store: Store, iteration: int, stage: str) -> list[tuple[str, Manifest]]:
    """Folder and manifest of every commit of ``stage`` in ``iteration``."""
    return _committed_in(store, f"{iteration_folder(iteration)}/{stage}")


def _committed_in(store: Store, parent: str) -> list[tuple[str, Manifest]]:
    found = []
    for folder in _folders_in(store, parent):
        with contextlib.suppress(NotCommittedError):
            found.append((folder, read_manifest(store, folder)))
    return found


def _folders_in(store: Store, parent: str) -> list[str]:
    return [f"{parent}/{name}" for name in store.names(parent)]
