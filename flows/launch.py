"""From a checked configuration to running work in this process."""

import os
import sys

from flows.config import Config, UserError
from flows.holding import hold_run, hold_unless_complete
from flows.plan import make_plan
from flows.record import execution_changes, open_run
from flows.report import Report, set_up_logging
from flows.session import Session
from stages.contract import Committed

_STAGES = ("rollout", "score", "update")


def launch(config: Config, debug: bool, allow_change: bool = False) -> None:
    """Train under Prefect; checks come before anything heavy is imported."""
    plan = make_plan(config)
    for change in execution_changes(config.url, config):
        print(f"ratchet: {change} (execution: no number changes)", file=sys.stderr)
    set_up_logging()
    run = open_run(plan, allow_change)
    _use_local_storage()
    # The flow holds the run too: here, it is refused before Prefect and all the rest are loaded.
    with hold_unless_complete(Session(run)):
        _train(config, debug)


def _train(config: Config, debug: bool) -> None:
    from flows.train import train_on_some_server

    try:
        url = train_on_some_server(config, debug)
    except KeyboardInterrupt:
        print(f"ratchet: stopped; go on with: ratchet resume {config.url}", file=sys.stderr)
        sys.exit(130)
    from flows.status import run_status, summary

    print(summary(run_status(url)), file=sys.stderr)


def run_stage(
    config: Config, name: str, iteration: int, debug: bool, retry_errors: bool = False
) -> None:
    """Run one stage of one iteration, without Prefect."""
    if name not in _STAGES:
        raise UserError(f"there is no stage {name!r}; there are {', '.join(_STAGES)}")
    if retry_errors and name != "score":
        raise UserError(f"--retry-errors is of score, and the stage is {name}: leave it out")
    if iteration > config.iterations:
        raise UserError(f"iteration {iteration} is past the run's {config.iterations}")
    run = open_run(make_plan(config))
    set_up_logging()
    with hold_run(run.store, config):
        report = Report()
        session = Session(run, report, debug)
        try:
            made = _make(session, name, iteration, retry_errors)
        finally:
            session.pools.close()
            report.close()
    state = "reused" if made.was_reused else "completed"
    print(
        f"{name} {iteration}: {state}, {made.manifest.rows} rows in {run.store.url}/{made.folder}"
    )


def _make(session: Session, name: str, iteration: int, retry_errors: bool) -> Committed:
    session.recall_all(before=iteration)
    session.recall(iteration)
    del session.history[iteration - 1 :]
    if name == "update":
        made = session.update(iteration)
        session.snapshot(iteration)
        return made
    if retry_errors:
        return session.retry_errors(iteration)
    work = session.rollout if name == "rollout" else session.score
    return work(iteration, session.open_round(iteration))


def _use_local_storage() -> None:
    # Prefect's result folder doesn't follow PREFECT_HOME by itself.
    if home := os.environ.get("PREFECT_HOME"):
        os.environ.setdefault("PREFECT_LOCAL_STORAGE_PATH", f"{home}/storage")
