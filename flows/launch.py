"""From a checked configuration to running work in this process."""

import os
import sys

from flows.config import Config, UserError
from flows.plan import make_plan
from flows.record import execution_changes, open_run
from flows.report import Report, set_up_logging

_STAGES = ("rollout", "score", "update")


def launch(config: Config, debug: bool, allow_change: bool = False) -> None:
    """Train under Prefect; checks come before anything heavy is imported."""
    plan = make_plan(config)
    for change in execution_changes(config.url, config):
        print(f"ratchet: {change} (execution: no number changes)", file=sys.stderr)
    open_run(plan, allow_change)
    set_up_logging()
    _use_local_storage()
    from flows.train import run

    try:
        url = run(config, debug, allow_change)
    except KeyboardInterrupt:
        print(f"ratchet: stopped; go on with: ratchet resume {config.url}", file=sys.stderr)
        sys.exit(130)
    from flows.status import run_status, summary

    print(summary(run_status(url)), file=sys.stderr)


def run_stage(config: Config, name: str, iteration: int, debug: bool) -> None:
    """Run one stage of one iteration, without Prefect."""
    if name not in _STAGES:
        raise UserError(f"there is no stage {name!r}; there are {', '.join(_STAGES)}")
    if iteration > config.iterations:
        raise UserError(f"iteration {iteration} is past the run's {config.iterations}")
    run = open_run(make_plan(config))
    set_up_logging()
    from flows.session import Session

    report = Report()
    session = Session(run, report, debug)
    try:
        session.recall_all(before=iteration)
        session.recall(iteration)
        del session.history[iteration - 1 :]
        made = getattr(session, name)(iteration)
        if name == "update":
            session.snapshot(iteration)
    finally:
        session.pools.close()
        report.close()
    state = "reused" if made.was_reused else "completed"
    print(
        f"{name} {iteration}: {state}, {made.manifest.rows} rows in {run.store.url}/{made.folder}"
    )


def _use_local_storage() -> None:
    # Prefect's result folder doesn't follow PREFECT_HOME by itself.
    if home := os.environ.get("PREFECT_HOME"):
        os.environ.setdefault("PREFECT_LOCAL_STORAGE_PATH", f"{home}/storage")
