"""``ratchet export``: a policy as a plain Hugging Face folder, without a trace of us in it."""

import os
import shutil
import uuid
from pathlib import Path

from artifacts.tombstones import refuse_retired
from flows.config import Config, UserError
from flows.holding import hold_run
from flows.plan import make_plan
from flows.record import open_run
from flows.report import Report, set_up_logging
from flows.session import Session
from stages.contract import Committed
from stages.update.export import save_policy


def export_policy(config: Config, to: str, iteration: int | None, debug: bool) -> None:
    """Write the policy after ``iteration`` (default: the newest) to folder ``to``.

    A policy without a snapshot is rebuilt by replaying its updates first, and then kept; one that
    has a snapshot is exported beside a training run too.

    Raises:
        RetiredError: ``ratchet gc`` removed its snapshot, or what it would be rebuilt from.
    """
    if Path(to).exists():
        raise UserError(f"{to} exists already: name a folder that does not")
    run = open_run(make_plan(config))
    set_up_logging()
    report = Report()
    session = Session(run, report, debug)
    try:
        version = iteration or _newest(session)
        session.recall_all(before=version + 1)
        snapshot = _snapshot(session)
        refuse_retired(run.store, snapshot.folder)
    finally:
        session.pools.close()
        report.close()
    temporary = f"{os.path.abspath(to)}.tmp-{uuid.uuid4().hex[:8]}"
    try:
        save_policy(run.store, snapshot.ref, config.model, temporary)
        os.replace(temporary, to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"policy {version} of {run.store.url} is at {to}")


def _snapshot(session: Session) -> Committed:
    if found := session.find_snapshot(session.history[-1]):
        return found
    with hold_run(session.store, session.config):
        return session.snapshot_now()


def _newest(session: Session) -> int:
    if not session.recall_finished():
        raise UserError(f"{session.store.url} has no finished iteration to export")
    return len(session.history)
