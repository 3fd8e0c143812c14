"""The training flow: an ordinary Prefect flow whose parameter is the configuration.

Prefect carries references, not data, and its result cache stays off: a task asks the store first,
and what is committed completes it as *Reused*.
"""

import sys
import urllib.request
from typing import Any

from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed
from prefect.tasks import exponential_backoff

from artifacts.errors import HeldError, IntegrityError, LeaseLostError, RetiredError
from artifacts.rounds import in_round
from flows.config import Config, UserError
from flows.evaluations import lines_of
from flows.holding import hold_unless_complete
from flows.plan import make_plan
from flows.record import open_run
from flows.report import Report
from flows.session import Session
from flows.tracking import Tracker
from stages.contract import Committed, StageError

_OPTIONS: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}


def _named(stage: str) -> Any:
    """Names of task runs: ``rollout-3``, and in the iteration's second round ``rollout-3.2``."""

    def name(parameters: dict[str, Any]) -> str:
        return f"{stage}-{in_round(parameters['iteration'], parameters['number'])}"

    return name


@task(task_run_name=_named("rollout"), **_OPTIONS)
def rollout(session: Session, iteration: int, number: int) -> State[Any]:
    """Policy and prompts to a round's rollout shards."""
    made = session.rollout(iteration, number)
    return _finish(session, "rollout", in_round(iteration, number), made)


@task(task_run_name=_named("score"), **_OPTIONS)
def score(session: Session, iteration: int, number: int) -> State[Any]:
    """A round's rollout shards to rewards."""
    made = session.score(iteration, number)
    return _finish(session, "score", in_round(iteration, number), made)


@task(task_run_name="update-{iteration}", **_OPTIONS)
def update(session: Session, iteration: int) -> State[Any]:
    """Scored shards to the next policy, and its snapshot where one is due."""
    made = session.update(iteration)
    session.snapshot(iteration)
    return _finish(session, "update", str(iteration), made)


@task(task_run_name="evaluate-{version}", **_OPTIONS)
def evaluate(session: Session, version: int) -> State[Any]:
    """A policy's answers to held-out prompts. Nothing of training depends on them."""
    made = session.evaluate(version)
    if made is None:
        return Completed(name="Skipped", message=f"policy {version} was let go by ratchet gc")
    for line in lines_of(made.manifest.metrics):
        state = "reused" if made.was_reused else None
        session.report.say("evaluate", iteration=version, **line, state=state)
    return _completed(made)


@flow(name="ratchet", flow_run_name="{config.run}", validate_parameters=True)
def train(config: Config, debug: bool = False, allow_change: bool = False) -> str:
    """Train, going on from what is committed. Returns the run's URL.

    Args:
        config: what to train, on what, how.
        debug: keep every worker in this process, so that breakpoints work.
        allow_change: go on with a configuration that gives other numbers from here on.
    """
    run = open_run(make_plan(config), allow_change)
    report = Report()
    session = Session(run, report, debug)
    tracker = Tracker(run.store, run.plan, report)
    try:
        with hold_unless_complete(session):
            iterate(session, tracker)
    except BaseException as error:
        tracker.close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    finally:
        session.pools.close()
        report.close()
    tracker.close("FINISHED")
    return run.store.url


def train_on_some_server(config: Config, debug: bool) -> str:
    """:func:`train` under the Prefect server that is set, or under one of its own where that one
    doesn't answer: a server that has died holds up no run."""
    url = PREFECT_API_URL.value()
    if url is None or _answers(url):
        return train(config, debug)
    print(
        f"ratchet: the Prefect server at {url} doesn't answer: this run has one of its own",
        file=sys.stderr,
    )
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        return train(config, debug)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def iterate(session: Session, tracker: Tracker) -> None:
    """Every iteration of the run: roll out and score, in as many rounds as it takes; update."""
    options = _retries(session.config)
    if not session.is_complete():
        session.pools.warm_up()
        session.look_back()  # while the workers start
    tracker.open(_flow_run_id())
    if session.evaluates(0):
        evaluate.with_options(**options)(session, 0)
        tracker.publish(0, session.iterations[0])
    for iteration in range(1, session.config.iterations + 1):
        for number in session.rounds(iteration):
            rollout.with_options(**options)(session, iteration, number)
            score.with_options(**options)(session, iteration, number)
        update.with_options(**options)(session, iteration)
        tracker.publish(iteration, session.iterations[iteration])
        if session.evaluates(iteration):
            evaluate.with_options(**options)(session, iteration)
            tracker.publish(iteration, session.iterations[iteration])


def _finish(session: Session, stage: str, place: str, made: Committed) -> State[Any]:
    session.report.stage(stage, place, made.manifest, made.was_reused)
    return _completed(made)


def _completed(made: Committed) -> State[Any]:
    name = "Reused" if made.was_reused else "Completed"
    return Completed(name=name, message=f"{made.folder} {made.manifest.digest[:16]}")


def _retries(config: Config) -> dict[str, Any]:
    return {
        "retries": config.retries.attempts,
        "retry_delay_seconds": exponential_backoff(backoff_factor=config.retries.delay_seconds),
        "retry_condition_fn": _is_worth_a_retry,
    }


# What fails the same way again: bad input, bad bytes or none, a stage's own verdict, another's run.
_FINAL = (
    UserError,
    IntegrityError,
    RetiredError,
    StageError,
    HeldError,
    LeaseLostError,
    ValueError,
    TypeError,
)


def _is_worth_a_retry(task: Any, task_run: Any, state: State[Any]) -> bool:
    return not isinstance(state.result(raise_on_failure=False), _FINAL)


def _flow_run_id() -> str:
    return str(runtime.flow_run.id or "")
