"""``ratchet rescore``: stored rollouts under another reward, in a run that branches there.

The new run has its parent's iterations before the first one rescored, and by reference the
rollouts of those that are. Its scores of them are its own. The first is what its own update is
made from; samples of the others were drawn by policies that it never had, so their scores are for
comparison, and going on draws those iterations anew.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import yaml

from artifacts.branches import open_store, relative_to
from artifacts.rounds import in_round
from artifacts.runs import read_record
from artifacts.shards import read_table
from artifacts.store import Store
from artifacts.tombstones import refuse_retired
from flows.branch import name_is_taken, start_branch
from flows.config import Config, UserError, differences, make_config
from flows.holding import hold_run
from flows.iteration import Round
from flows.plan import Plan, make_plan
from flows.record import located, open_run
from flows.report import Report, set_up_logging
from flows.revisions import Run, newest_record, plan_at, read_revisions
from flows.session import Session
from flows.tables import print_table
from stages.contract import Committed
from stages.score.comparison import Comparison, compare
from stages.score.run import score_work

VERDICT = 0.5
_COLUMNS = ["iteration", "samples", "old", "new", "correlation", "flipped", "old null", "new null"]


def print_rescore(
    url: str,
    rewards: Sequence[str],
    name: str,
    iterations: str | None,
    verdict: float,
    debug: bool,
    as_json: bool,
) -> None:
    """Rescore the run at ``url`` and print old against new, iteration by iteration."""
    set_up_logging()
    child, found = rescore(url, rewards, name, iterations, verdict, debug)
    if as_json:
        rows = [asdict(each) for each in found]
        print(json.dumps({"run": child, "parent": url, "iterations": rows}, indent=1))
        return
    print_table(_COLUMNS, [_row(each) for each in found])
    first = found[0].iteration
    print(f"\nright: a reward of {verdict:g} or more; flipped: right in one scoring alone")
    print(f"{child} has these scores; its update {first} is made of them: ratchet resume {child}")


def rescore(
    url: str,
    rewards: Sequence[str],
    name: str,
    iterations: str | None = None,
    verdict: float = VERDICT,
    debug: bool = False,
) -> tuple[str, list[Comparison]]:
    """Score stored rollouts of the run at ``url`` with ``rewards``, in the new run ``name``.

    Where the same was begun before, it is gone on with. Returns the new run's URL.

    Args:
        rewards: see :func:`reward_of`.
        iterations: ``A:B``, first and last; default: all that are finished.

    Raises:
        UserError: the rewards or iterations can't be, or another run has that name.
        StageError: too many samples failed.
        RetiredError: ``ratchet gc`` removed the samples.
    """
    parent = open_store(url)
    record = newest_record(parent) if url else None
    if record is None:
        raise UserError(f"there is no run at {url!r}: give the folder or URL that holds run.json")
    past = Session(Run(parent, read_revisions(parent)))
    chosen = range_of(iterations, past.recall_finished())
    specs = [reward_of(text) for text in rewards]
    config = _config_at(past, url, record, chosen.start, name, specs)
    plan = make_plan(config)
    for iteration in chosen:
        for made in past.iterations[iteration].rounds:
            refuse_retired(parent, made.rollout.folder)
    _start(plan, parent, past, chosen)
    report = Report()
    session = Session(open_run(plan), report, debug)
    try:
        with hold_run(session.store, config):
            found = [_rescore_one(session, past, i, i == chosen.start) for i in chosen]
    finally:
        session.pools.close()
        report.close()
    return config.url, [
        compare(i, _scores(past.store, old), _scores(session.store, new), verdict)
        for i, (old, new) in zip(chosen, found, strict=True)
    ]


def reward_of(text: str) -> dict[str, Any]:
    """The reward that ``NAME`` or ``NAME=WEIGHT`` says, or a YAML mapping as in the config.

    Raises:
        UserError: it says none. Whether there is such a function is not looked at.
    """
    if text.lstrip().startswith("{"):
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = None
        if not isinstance(value, dict):
            raise UserError(f"--reward {text!r} is no YAML mapping: write {{fn: file.py:function}}")
        return value
    name, separator, weight = text.rpartition("=")
    if not separator:
        return {"fn": text}
    try:
        return {"fn": name, "weight": float(weight)}
    except ValueError:
        raise UserError(
            f"--reward {text!r} has {weight!r} for a weight: write file.py:function=0.5"
        ) from None


def range_of(text: str | None, finished: int) -> range:
    """The iterations that ``A:B``, ``A:``, ``:B`` or ``A`` says, ends included.

    Raises:
        UserError: it says none of those that are finished.
    """
    if finished == 0:
        raise UserError("the run has no finished iteration: there is nothing to score again")
    first, separator, last = (text or ":").partition(":")
    try:
        start = int(first or 1)
        end = int(last or finished) if separator else start
    except ValueError:
        raise UserError(f"--iterations {text!r} is not A:B, such as 2:5") from None
    if not 1 <= start <= end <= finished:
        raise UserError(
            f"--iterations {text} is not within 1:{finished}, the iterations that are finished"
        )
    return range(start, end + 1)


def _config_at(
    past: Session,
    url: str,
    newest: dict[str, Any],
    first: int,
    name: str,
    rewards: list[dict[str, Any]],
) -> Config:
    """The new run's configuration: that of iteration ``first``, but for the rewards."""
    before = plan_at(past.run.revisions, first)
    values = located(before.config.model_dump(mode="json"), url)
    values["run"], values["iterations"] = name, newest["config"]["iterations"]
    values["score"] = {**values["score"], "rewards": rewards}
    return make_config(values, [], "--reward")


def _start(plan: Plan, parent: Store, past: Session, chosen: range) -> None:
    """Write the new run's record, or find that the same was begun."""
    changes = differences(
        plan_at(past.run.revisions, chosen.start).record()["identity"], plan.record()["identity"]
    )
    for change in changes:
        if change.field.partition(".")[0] not in ("score", "functions", "total_steps"):
            raise UserError(
                f"the stored samples were drawn with another configuration ({change}): give it "
                "back, as rescoring changes rewards alone"
            )
    there = read_record(Store(plan.config.url))
    if there is None:
        start_branch(plan, parent, past.history[: chosen.start - 1], changes, chosen[-1])
        return
    above = {
        "url": relative_to(plan.config.url, parent.url),
        "iteration": chosen.start - 1,
        "rollouts": chosen[-1],
    }
    if there.get("parent") != above or there["identity"] != plan.record()["identity"]:
        raise name_is_taken(plan.config.url)


def _rescore_one(
    session: Session, past: Session, iteration: int, is_first: bool
) -> tuple[list[Committed], list[Committed]]:
    """Old and new scores of the iteration's rounds, in order."""
    rounds = past.iterations[iteration].rounds
    mine = _score_own(session, iteration) if is_first else {}
    old, new = [], []
    for number, made in enumerate(rounds, start=1):
        assert made.scores is not None
        old.append(made.scores)
        folder = made.rollout.folder
        scores = mine[folder] if folder in mine else _compare_one(session, iteration, number, made)
        new.append(scores)
    return old, new


def _score_own(session: Session, iteration: int) -> dict[str, Committed]:
    """Score what the new run's own update will take, as a resume would. By rollout folder."""
    session.recall_all(before=iteration)
    scored = {}
    for number in session.rounds(iteration):
        rounds = session.recall(iteration).rounds
        if number > len(rounds):  # the new rewards ask for another round than was drawn
            break
        scores = session.score(iteration, number)
        session.report.stage("score", in_round(iteration, number), scores.manifest, False)
        scored[rounds[number - 1].rollout.folder] = scores
    return scored


def _compare_one(session: Session, iteration: int, number: int, made: Round) -> Committed:
    work = score_work(
        iteration, session.config.score, session.plan.functions, made.rollout, reference=None
    )
    progress = session.report.progress("score", in_round(iteration, number))
    scores = session.score_alone(work, made.rollout, session.config.score, progress)
    session.report.stage("score", in_round(iteration, number), scores.manifest, scores.was_reused)
    return scores


def _scores(store: Store, rounds: Sequence[Committed]) -> pa.Table:
    columns = ("sample_id", "reward", "token_rewards")
    tables = [read_table(store, each.folder, each.manifest, columns) for each in rounds]
    return pa.concat_tables(tables, promote_options="default")


def _row(found: Comparison) -> list[str]:
    return [
        str(found.iteration),
        f"{found.samples:,}",
        _text(found.old_mean),
        _text(found.new_mean),
        _text(found.correlation),
        f"{found.flipped:,}",
        f"{found.old_null:,}",
        f"{found.new_null:,}",
    ]


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
