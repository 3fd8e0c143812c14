"""``ratchet branch``: a run that goes on from another one's policy, under changes of its own."""

import json
from collections.abc import Sequence

from artifacts.branches import open_store, relative_to
from artifacts.errors import AlreadyExistsError
from artifacts.runs import write_record
from artifacts.store import Store
from flows.config import UserError, differences
from flows.holding import check_store
from flows.plan import Plan, make_plan
from flows.record import config_of
from flows.revisions import Run, plan_at, read_revisions, what_never_changes
from flows.session import Session


def branch(url: str, iteration: int, name: str, overrides: Sequence[str]) -> str:
    """Make run ``name`` beside the run at ``url``: its policy ``iteration`` and all before it.

    Nothing is copied; the child reads what it inherits from its parent. Returns the child's URL.

    Raises:
        UserError: the parent has not come so far, or a run of that name is there.
    """
    config = config_of(url, [f"run={json.dumps(name)}", *overrides])
    parent = open_store(url)
    revisions = read_revisions(parent)
    finished = Session(Run(parent, revisions)).recall_finished()
    if iteration > finished:
        raise UserError(
            f"run {url} has finished {finished} iterations, and a branch from {iteration} "
            "was asked for: name one that is finished"
        )
    plan = make_plan(config)
    changes = differences(
        plan_at(revisions, iteration).record()["identity"], plan.record()["identity"]
    )
    if kept := what_never_changes(changes):
        raise UserError(f"a branch keeps {kept[0]} of its parent, and {changes[0]} was asked for")
    _write(plan, parent, iteration, [str(change) for change in changes])
    return plan.config.url


def _write(plan: Plan, parent: Store, iteration: int, changed: list[str]) -> None:
    child = plan.config.url
    record = {
        **plan.record(),
        "parent": {"url": relative_to(child, parent.url), "iteration": iteration},
        "changed": changed,
    }
    store = Store(child)
    try:
        check_store(store, plan.config)
        write_record(store, record)
    except AlreadyExistsError:
        raise UserError(
            f"there is a run at {child} already: give the branch another name"
        ) from None
