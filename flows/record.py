"""A run's record: written when it starts, and what a later start is held against."""

from typing import Any

from artifacts.errors import AlreadyExistsError
from artifacts.keys import canonical
from artifacts.runs import read_record, write_record
from artifacts.store import Store
from flows.config import Config, UserError, differences, make_config
from flows.plan import Plan


def open_run(plan: Plan) -> Store:
    """The store of the plan's run; its record is written, or agrees.

    Raises:
        UserError: a run of that name has another identity; the message names what differs.
    """
    store = Store(plan.config.url)
    identity = plan.identity()
    record = read_record(store)
    if record is None:
        config = plan.config.model_dump(mode="json")
        try:
            write_record(store, {"version": 1, "config": config, "identity": identity})
        except AlreadyExistsError:
            record = read_record(store)
        except OSError as error:
            raise UserError(f"store {plan.config.store!r} can't be written: {error}") from error
    if record is not None and canonical(record["identity"]) != canonical(identity):
        changed = "; ".join(differences(record["identity"], _as_json(identity)))
        raise UserError(
            f"run {store.url} was started with another configuration ({changed}): "
            "give it back its own, or start another run with run=NAME"
        )
    return store


def config_of(url: str, overrides: list[str]) -> Config:
    """The configuration that the run at ``url`` was started with, with overrides applied."""
    record = read_record(Store(url)) if url else None
    if record is None:
        raise UserError(f"there is no run at {url!r}: give the folder or URL that holds run.json")
    values: dict[str, Any] = record["config"]
    where, _, name = url.rstrip("/").rpartition("/")
    # The run is where it was found, wherever it was when it started.
    return make_config({**values, "store": where or ".", "run": name}, overrides, f"{url}/run.json")


def _as_json(value: dict[str, Any]) -> dict[str, Any]:
    import json

    return dict(json.loads(canonical(value)))
