"""``ratchet branch``: a run that goes on from another one's policy, under changes of its own."""

import json
from collections.abc import Sequence

from artifacts.branches import open_store, relative_to
from artifacts.errors import AlreadyExistsError
from artifacts.pins import pin_branch
from artifacts.runs import read_record, write_record
from artifacts.store import Store
from flows.config import Difference, UserError, differences
from flows.holding import check_store
from flows.plan import Plan, make_plan
from flows.record import config_of
from flows.revisions import Run, plan_at, read_revisions, what_never_changes
from flows.session import Session
from stages.contract import Committed
from stages.update.trainers import is_rebuildable


def branch(url: str, iteration: int, name: str, overrides: Sequence[str]) -> str:
    """Make run ``name`` beside the run at ``url``: its policy ``iteration`` and all before it.

    Nothing is copied; the child reads what it inherits from its parent, where a pin keeps it from
    ``ratchet gc``. Returns the child's URL.

    Raises:
        UserError: the parent has not come so far, its ``gc`` has let go of that policy, or a run
            of that name is there.
    """
    config = config_of(url, [f"run={json.dumps(name)}", *overrides])
    parent = open_store(url)
    revisions = read_revisions(parent)
    session = Session(Run(parent, revisions))
    finished = session.recall_finished()
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
    if read_record(Store(plan.config.url)) is not None:
        raise name_is_taken(plan.config.url)
    start_branch(plan, parent, session.history[:iteration], changes)
    return plan.config.url


def start_branch(
    plan: Plan,
    parent: Store,
    history: Sequence[Committed],
    changes: Sequence[Difference],
    rollouts: int = 0,
) -> None:
    """Make the run of ``plan`` one that goes on from the policy after ``history``.

    Args:
        rollouts: the last iteration whose rollouts it takes from ``parent`` too; 0: none.

    Raises:
        UserError: ``ratchet gc`` has let go of that policy, or a run of that name is there.
    """
    child = plan.config.url
    _pin(parent, child, history, rollouts)
    above = {"url": relative_to(child, parent.url), "iteration": len(history)}
    record = {
        **plan.record(),
        "parent": {**above, "rollouts": rollouts} if rollouts else above,
        "changed": [str(change) for change in changes],
    }
    store = Store(child)
    try:
        check_store(store, plan.config)
        write_record(store, record)
    except AlreadyExistsError:
        raise name_is_taken(child) from None


def _pin(parent: Store, child: str, history: Sequence[Committed], rollouts: int) -> None:
    if is_rebuildable(parent, history):
        try:
            pin_branch(parent, child, len(history), rollouts)
        except ValueError as error:
            raise UserError(f"{error}; give the branch another name") from error
        except OSError as error:
            raise UserError(f"the branch can't be pinned in {parent.url}: {error}") from error
    # Looked at again: a collection may have been on its way when the pin was written.
    if not is_rebuildable(parent, history):
        raise UserError(
            f"policy {len(history)} of {parent.url} was let go by ratchet gc: branch from one that "
            "ratchet gc --dry-run lists as within reach"
        )


def name_is_taken(url: str) -> UserError:
    """The sentence for a branch whose name another run has."""
    return UserError(f"there is a run at {url} already: give the branch another name")
