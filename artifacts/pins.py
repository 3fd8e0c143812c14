"""What of a run others count on: a small file for each, that ``ratchet gc`` obeys.

    <store>/<run>/pins/child-000012.json     {"by": "../child", "policies": [12], …}

Who pins first writes the pin, then looks whether what it pins is still there.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from artifacts.branches import BranchStore, relative_to
from artifacts.errors import AlreadyExistsError, IntegrityError
from artifacts.store import Store

FOLDER = "pins"
USER = "user"
_NAME = re.compile(r"[\w.\-]+")


@dataclass(frozen=True)
class Pin:
    """What is to stay.

    Attributes:
        name: the file's name, without its suffix.
        by: who counts on it: URL of another run, relative where both lie in one folder; or "user".
        reason: for people.
        policies: versions that have to stay within reach: as a snapshot, or by replay.
        iterations: those whose rollouts, scores and updates have to stay.
    """

    name: str
    by: str
    reason: str
    policies: tuple[int, ...] = ()
    iterations: tuple[int, ...] = ()

    @property
    def path(self) -> str:
        """Where the pin lies in the run."""
        return f"{FOLDER}/{self.name}.json"


def write_pin(
    store: Store,
    name: str,
    by: str = USER,
    reason: str = "",
    policies: Sequence[int] = (),
    iterations: Sequence[int] = (),
) -> Pin:
    """Pin ``policies`` and ``iterations`` of the run. A second time, the same pin is no conflict.

    Raises:
        ValueError: the name is none, or is that of another pin.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} names no pin: take letters, digits, '.', '-' and '_'")
    pin = Pin(name, by, reason, tuple(sorted(policies)), tuple(sorted(iterations)))
    values = {key: value for key, value in asdict(pin).items() if key != "name"}
    try:
        store.create(pin.path, json.dumps(values, sort_keys=True, indent=1).encode())
    except AlreadyExistsError:
        there = _read(store, name)
        if there is not None and there != pin:
            raise ValueError(f"there is another pin {name!r} in {store.url}: {there}") from None
    return pin


def pin_branch(store: Store, child_url: str, version: int, rollouts: int = 0) -> None:
    """Pin policy ``version``, that the run at ``child_url`` goes on from, up the line of parents;
    and the iterations after it up to ``rollouts``, whose samples it scores anew.

    The pin's name says all of it, so that runs which branch at once never meet in one file.
    """
    child = child_url.rpartition("/")[2]
    by = relative_to(store.url, child_url)
    reason = f"branch from policy {version}"
    scored = range(version + 1, rollouts + 1)
    name = f"{child}-{version:06d}" + (f"-{rollouts:06d}" if scored else "")
    write_pin(store, name, by, reason, policies=[version], iterations=scored)
    if isinstance(store, BranchStore):
        above = min(version, store.iteration)
        pin_branch(store.parent, child_url, above, min(rollouts, store.rollouts))


def read_pins(store: Store) -> list[Pin]:
    """All pins of the run, by name. Raises IntegrityError where one can't be read."""
    names = [name.removesuffix(".json") for name in store.names(FOLDER)]
    found = (_read(store, name) for name in names)
    return [pin for pin in found if pin is not None]


def remove_pin(store: Store, name: str) -> None:
    """Remove a pin; afterwards it is gone."""
    store.remove(f"{FOLDER}/{name}.json")


def _read(store: Store, name: str) -> Pin | None:
    path = f"{FOLDER}/{name}.json"
    try:
        data = store.read(path)
    except FileNotFoundError:  # removed meanwhile
        return None
    try:
        values: dict[str, Any] = json.loads(data)
        policies, iterations = tuple(values["policies"]), tuple(values["iterations"])
        return Pin(name, values["by"], values["reason"], policies, iterations)
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(path, "a pin", f"{error!r} on reading it", "content") from error
