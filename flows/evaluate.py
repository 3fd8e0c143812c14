"""``ratchet evaluate``: held-out data answered by a policy of a run, or by a model's folder.

A model without a run gets one that is never trained, in ``runs/evaluations`` or where ``--to``
says; its policy 0 is evaluated. So whatever reads a run reads its evaluation too.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts.branches import open_store
from artifacts.keys import key_of
from artifacts.runs import read_record
from flows.config import Config, UserError, make_config, override_value
from flows.evaluations import as_json, evaluation_row, print_evaluations
from flows.holding import hold_run
from flows.plan import make_plan
from flows.record import config_of, open_run
from flows.report import Report, set_up_logging
from flows.rescore import reward_of
from flows.session import Session
from flows.tracking import publish_evaluation
from stages.contract import Committed
from stages.models import model_digest

_STORE = "runs/evaluations"


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; None where it says nothing."""

    data: str | None = None
    samples: int | None = None
    ks: str | None = None
    greedy: bool = False
    rewards: Sequence[str] = ()

    def values(self) -> dict[str, Any]:
        """As a configuration's ``evaluate`` section has it."""
        found: dict[str, Any] = {}
        if self.data is not None:
            found["data"] = {"path": self.data, "name": Path(self.data).stem or "data"}
        if self.samples is not None:
            found["samples_per_prompt"] = self.samples
        elif self.greedy:
            found["samples_per_prompt"] = 0
        if self.greedy:
            found["greedy"] = True
        if self.ks is not None:
            found["k"] = _numbers(self.ks)
        if self.rewards:
            found["rewards"] = [reward_of(text) for text in self.rewards]
        return found


def print_evaluation(
    url: str,
    asked: Asked,
    iteration: int | None,
    to: str | None,
    overrides: Sequence[str],
    debug: bool,
    wants_json: bool,
) -> None:
    """Evaluate what lies at ``url`` and print what came out."""
    set_up_logging()
    is_run = read_record(open_store(url)) is not None
    if is_run and to is not None:
        raise UserError(f"{url} is a run and keeps its own evaluations: leave out --to")
    if not is_run and iteration:
        raise UserError(f"{url} is no run, and has no iteration {iteration}: leave it out")
    config = _of_run(url, asked, overrides) if is_run else _of_model(url, asked, to, overrides)
    row = evaluate(config, iteration if is_run else 0, debug)
    if wants_json:
        print(as_json(config.url, row))
        return
    print_evaluations([row])
    print(f"\n{config.url}/{row['folder']}")
    print(f"ratchet samples {config.url} --evaluation {row['policy']} --sort 'reward desc'")


def evaluate(config: Config, version: int | None, debug: bool = False) -> dict[str, Any]:
    """Evaluate policy ``version`` (default: the newest) of the run that ``config`` is of.

    Raises:
        UserError: there is no such policy, or ``ratchet gc`` let go of it.
        StageError: too many samples had an error.
    """
    report = Report()
    session = Session(open_run(make_plan(config)), report, debug)
    try:
        finished = session.recall_finished() if version != 0 else 0
        version = finished if version is None else version
        if version > finished:
            raise UserError(
                f"run {config.url} has finished {finished} iterations, and none makes policy "
                f"{version}: take --iteration {finished} or less"
            )
        del session.history[version:]
        made = _find_or_make(session, version)
        publish_evaluation(session, version, made)
    finally:
        session.pools.close()
        report.close()
    return evaluation_row(version, made.folder, made.manifest)


def _find_or_make(session: Session, version: int) -> Committed:
    if found := session.find_evaluation(version):
        return found
    with hold_run(session.store, session.config):
        made = session.evaluate(version)
    if made is None:
        raise UserError(
            f"policy {version} of {session.config.url} was let go by ratchet gc, and has no such "
            "evaluation: take a policy that ratchet status shows as kept"
        )
    return made


def _of_run(url: str, asked: Asked, overrides: Sequence[str]) -> Config:
    record = config_of(url, [])
    before = {} if record.evaluate is None else record.evaluate.model_dump(mode="json")
    new = asked.values()
    if asked.samples is not None or asked.greedy:  # as asked for, not beside what the run does
        before = {k: v for k, v in before.items() if k not in ("greedy", "samples_per_prompt")}
        if asked.ks is None:
            before.pop("k", None)
    if asked.data is not None:  # read as the run's own data is, to its end
        columns = record.data.all_sources[0]
        new["data"] |= {"prompt": columns.prompt, "answer": columns.answer}
        before = {k: v for k, v in before.items() if k not in ("data", "max_prompts")}
    values = {**before, **new}
    if "data" not in values and not any(o.startswith("evaluate.data") for o in overrides):
        raise UserError(f"run {url} has no held-out data of its own: give --data FILE")
    return config_of(url, [f"evaluate={json.dumps(values)}", *overrides])


def _of_model(url: str, asked: Asked, to: str | None, overrides: Sequence[str]) -> Config:
    if not Path(url, "config.json").is_file():
        raise UserError(
            f"there is no run and no model at {url!r}: a run's folder holds run.json, "
            "a model's config.json"
        )
    if asked.data is None:
        raise UserError("there is nothing to answer: give --data FILE")
    if not asked.rewards:
        raise UserError("nothing says what is right: give --reward, a built-in or file.py:function")
    evaluation = asked.values()
    values: dict[str, Any] = {
        "model": url,
        "iterations": 1,
        "data": {"path": asked.data, "batch_size": 1},
        "score": {"rewards": evaluation.pop("rewards")},
        "evaluate": evaluation,
        "tracking": {"enabled": False},
        "store": _STORE,
    }
    for override in overrides:
        values = override_value(values, override)
    columns = {
        name: values["data"][name] for name in ("prompt", "answer") if name in values["data"]
    }
    held_out = {**columns, **values["evaluate"]["data"]}
    values = {**values, "evaluate": {**values["evaluate"], "data": held_out}}
    config = make_config(values, [], "ratchet evaluate")
    where, name = _STORE, f"{Path(url).name}-{_digest(config)[:8]}"
    if to is not None:
        where, _, name = to.rstrip("/").rpartition("/")
    return make_config({**values, "store": where or ".", "run": name}, [], "ratchet evaluate")


def _digest(config: Config) -> str:
    """What tells two evaluations of models apart that are not to share a folder."""
    assert config.evaluate is not None
    identity = [model_digest(config.model), config.identity(), config.evaluate.identity()]
    # Of one configuration with other rows, prompts and keys differ, and the run's identity.
    return key_of([*identity, make_plan(config).data_digest])


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--k {text!r} holds no numbers: write 1,4,8") from None
