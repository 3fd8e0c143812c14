"""The configurations of a run, each with the first iteration that was made with it.

    run.json                     the first, written when the run starts
    revisions/000002.json        the next, written when a changed one was asked for and allowed

An iteration's work is described with the configuration of its own time, so what was committed
before a change is found after it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from artifacts.branches import BranchStore
from artifacts.runs import read_record
from artifacts.store import Store
from flows.config import Difference
from flows.plan import Plan, plan_of_record

_FOLDER = "revisions"
_STAGE_OF = {
    "score": "score",
    "functions": "score",
    "update": "update",
    "update_functions": "update",
    "critic_digest": "score",
    "total_steps": "update",
}
_FOR_EVER = {"model_digest": "the model", "tokenizer_digest": "the tokenizer"}


@dataclass(frozen=True)
class Revision:
    """A plan, and the first iteration that is made with it."""

    first: int
    plan: Plan


@dataclass(frozen=True)
class Run:
    """An open run: its store, and the revisions of its configuration, the newest last."""

    store: Store
    revisions: list[Revision]

    @property
    def plan(self) -> Plan:
        """The plan that the run goes on with."""
        return self.revisions[-1].plan


def read_revisions(store: Store) -> list[Revision]:
    """The run's revisions in order, its parents' before its own; [] where no run lies."""
    record = read_record(store)
    if record is None:
        return []
    inherited: list[Revision] = []
    first = 1
    if isinstance(store, BranchStore):
        first = store.iteration + 1
        inherited = [r for r in read_revisions(store.parent) if r.first < first]
    later = [json.loads(store.read(f"{_FOLDER}/{name}")) for name in store.names(_FOLDER)]
    own = [Revision(first, plan_of_record(record))]
    return [*inherited, *own, *(Revision(r["first"], plan_of_record(r)) for r in later)]


def newest_record(store: Store) -> dict[str, Any] | None:
    """The record of the newest revision, or None where no run lies."""
    names = store.names(_FOLDER)
    if names:
        return dict(json.loads(store.read(f"{_FOLDER}/{names[-1]}")))
    return read_record(store)


def write_revision(store: Store, first: int, plan: Plan, changes: Sequence[Difference]) -> None:
    """Record that iterations from ``first`` on are made with ``plan``."""
    number = len(store.names(_FOLDER)) + 2
    record = {**plan.record(), "first": first, "changed": [str(change) for change in changes]}
    data = json.dumps(record, sort_keys=True, indent=1).encode()
    store.create(f"{_FOLDER}/{number:06d}.json", data)


def plan_at(revisions: Sequence[Revision], iteration: int) -> Plan:
    """The plan that ``iteration`` is made with."""
    return revision_at(revisions, iteration).plan


def revision_at(revisions: Sequence[Revision], iteration: int) -> Revision:
    """The revision that ``iteration`` is made with."""
    return next(revision for revision in reversed(revisions) if revision.first <= iteration)


def stages_from(change: Difference) -> str:
    """The stages whose work a changed identity field changes: the first, and all after it."""
    order = ("rollout", "score", "update")
    first = _STAGE_OF.get(change.field.partition(".")[0], "rollout")
    return ", ".join(order[order.index(first) :])


def what_never_changes(changes: Sequence[Difference]) -> list[str]:
    """Names of changed things that a run keeps from its first iteration to its last."""
    return [_FOR_EVER[change.field] for change in changes if change.field in _FOR_EVER]
