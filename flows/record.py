"""Opening a run: its record written, or held against what is asked for now."""

from collections.abc import Sequence
from typing import Any

from artifacts.branches import open_store
from artifacts.errors import AlreadyExistsError
from artifacts.keys import canonical
from artifacts.runs import write_record
from artifacts.store import Store
from flows.config import Config, Difference, UserError, differences, make_config
from flows.holding import cannot_write, check_store, hold_run
from flows.plan import Plan
from flows.revisions import (
    Revision,
    Run,
    newest_record,
    read_revisions,
    stages_from,
    what_never_changes,
    write_revision,
)
from flows.session import Session
from stages.update.config import UpdateConfig


def open_run(plan: Plan, allow_change: bool = False) -> Run:
    """The plan's run; its record is written, or agrees.

    Args:
        allow_change: go on with another identity, from the first iteration that isn't finished.

    Raises:
        UserError: a run of that name has another identity; the message names what differs, and
            what of the run that would change. Or the store can't be written, or can't keep a
            second writer out.
        HeldError: the change is allowed, and another process writes in the run.
    """
    store = open_store(plan.config.url)
    revisions = read_revisions(store) or _start(store, plan)
    changes = differences(revisions[-1].plan.record()["identity"], plan.record()["identity"])
    if changes:
        _refuse_for_ever(store, changes)
        if not allow_change:
            raise UserError(_refusal(store, changes, _first_unfinished(Run(store, revisions))))
        with hold_run(store, plan.config):
            return _change(store, plan)
    # Same numbers; what says where and how fast is what is asked for now.
    return Run(store, [*revisions[:-1], Revision(revisions[-1].first, plan)])


def config_of(url: str, overrides: Sequence[str]) -> Config:
    """The configuration that the run at ``url`` goes on with, with overrides applied."""
    record = newest_record(open_store(url)) if url else None
    if record is None:
        raise UserError(f"there is no run at {url!r}: give the folder or URL that holds run.json")
    values = located(record["config"], url)
    if any(override.startswith("update.algorithm=") for override in overrides):
        # What the run's own algorithm had set is for the new one to set.
        values = {**values, "update": UpdateConfig(**values["update"]).own_values()}
    return make_config(values, overrides, f"{url}/run.json")


def located(values: dict[str, Any], url: str) -> dict[str, Any]:
    """A recorded configuration with the run where it was found, wherever it was at its start."""
    where, _, name = url.rstrip("/").rpartition("/")
    return {**values, "store": where or ".", "run": name}


def execution_changes(url: str, config: Config) -> list[Difference]:
    """What ``config`` says of where and how fast that the run at ``url`` did not when recorded."""
    record = newest_record(open_store(url))
    if record is None:
        return []
    old = Config.model_validate(located(record["config"], url))
    if canonical(old.identity()) != canonical(config.identity()):
        return []
    return differences(old.model_dump(mode="json"), config.model_dump(mode="json"))


def _start(store: Store, plan: Plan) -> list[Revision]:
    try:
        check_store(store, plan.config)
        write_record(store, plan.record())
    except AlreadyExistsError:
        return read_revisions(store)
    except OSError as error:
        raise cannot_write(plan.config, error) from error
    return [Revision(1, plan)]


def _change(store: Store, plan: Plan) -> Run:
    # What is finished and what was changed are read again: now nobody else writes.
    revisions = read_revisions(store)
    changes = differences(revisions[-1].plan.record()["identity"], plan.record()["identity"])
    if changes:
        first = _first_unfinished(Run(store, revisions))
        write_revision(store, first, plan, changes)
        revisions.append(Revision(first, plan))
    return Run(store, revisions)


def _first_unfinished(run: Run) -> int:
    return Session(run).recall_finished() + 1


def _refuse_for_ever(store: Store, changes: Sequence[Difference]) -> None:
    if kept := what_never_changes(changes):
        raise UserError(
            f"run {store.url} was started with other weights ({'; '.join(map(str, changes))}): "
            f"{kept[0]} stays the same from a run's first iteration to its last; give it back, "
            "or start another run with run=NAME"
        )


def _refusal(store: Store, changes: Sequence[Difference], first: int) -> str:
    lines = [f"{change} ({stages_from(change)} from iteration {first} on)" for change in changes]
    return (
        f"run {store.url} was started with another configuration: {'; '.join(lines)}. "
        "Give it back its own, go on with the new one by --allow-change, "
        "or start another run with run=NAME"
    )
