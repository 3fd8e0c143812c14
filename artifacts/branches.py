"""A run that begins where another one was: the parent's artifacts, by reference.

    <store>/<child>/run.json    {"parent": {"url": "../first", "iteration": 12, …}, …}

What the child has not is read from its parent, for iterations up to the branch alone; where the
parent's samples are scored anew (``"rollouts": 20``), rollouts up to that iteration too. Nothing
is copied, and nothing but a pin (:mod:`artifacts.pins`) is ever written to the parent.
"""

import posixpath
from typing import Any

from artifacts.runs import read_record
from artifacts.store import Store


class BranchStore(Store):
    """A run's folder, with its parent's behind it.

    Attributes:
        iteration: the last that is inherited whole.
        rollouts: the last whose rollouts are; the same one but where samples are scored anew.
    """

    def __init__(self, url: str, parent: Store, iteration: int, rollouts: int = 0) -> None:
        super().__init__(url)
        self.parent, self.iteration = parent, iteration
        self.rollouts = max(iteration, rollouts)

    def __reduce__(self) -> tuple[Any, ...]:
        return BranchStore, (self.url, self.parent, self.iteration, self.rollouts)

    def owner(self, folder: str) -> Store:
        if super().exists(folder) or not self.is_inherited(folder):
            return self
        return self.parent.owner(folder)

    def read(self, path: str, is_large: bool = False) -> bytes:
        try:
            return super().read(path, is_large)
        except FileNotFoundError:
            if not self.is_inherited(path):
                raise
            return self.parent.read(path, is_large)

    def exists(self, path: str) -> bool:
        return super().exists(path) or (self.is_inherited(path) and self.parent.exists(path))

    def size(self, path: str) -> int | None:
        own = super().size(path)
        return self.parent.size(path) if own is None and self.is_inherited(path) else own

    def sizes(self, path: str) -> dict[str, int]:
        theirs = self.parent.sizes(path) if self.is_inherited(path) else {}
        below = {name: size for name, size in theirs.items() if self.is_inherited(f"{path}/{name}")}
        return {**below, **super().sizes(path)}

    def names(self, path: str) -> list[str]:
        below = f"{path}/" if path else ""
        theirs = [n for n in self.parent.names(path) if self.is_inherited(f"{below}{n}")]
        return sorted({*super().names(path), *theirs})

    def is_inherited(self, path: str) -> bool:
        """Whether the parent's ``path`` is part of this run too."""
        top, _, rest = path.partition("/")
        first = rest.partition("/")[0]
        if top.startswith("iteration-"):
            last = self.rollouts if first in ("", "rollout") else self.iteration
            return _is_up_to(top.removeprefix("iteration-"), last)
        if top.startswith("evaluation-"):
            return _is_up_to(top.removeprefix("evaluation-"), self.iteration)
        if top == "policy":
            return not first or _is_up_to(first, self.iteration)
        return top == "prompts"


def open_store(url: str) -> Store:
    """The store of the run at ``url``, with those of its parents behind it."""
    store = Store(url)
    record = read_record(store)
    parent = record.get("parent") if record else None
    if parent is None:
        return store
    above = open_store(parent_url(store.url, parent["url"]))
    rollouts = int(parent.get("rollouts", 0))
    return BranchStore(store.url, above, int(parent["iteration"]), rollouts)


def relative_to(url: str, parent: str) -> str:
    """``parent`` as a child at ``url`` records it: by name where both lie in one folder."""
    ours, theirs = url.rpartition("/"), parent.rpartition("/")
    return f"../{theirs[2]}" if ours[0] == theirs[0] else parent


def parent_url(url: str, recorded: str) -> str:
    """Where the parent that a child at ``url`` recorded lies."""
    if not recorded.startswith("../"):
        return recorded
    return posixpath.join(url.rpartition("/")[0], recorded.removeprefix("../"))


def _is_up_to(number: str, last: int) -> bool:
    return number.isdecimal() and int(number) <= last
