"""``ratchet replay``: an update made again from its inputs, and held against its commit."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from artifacts.manifests import Manifest, Ref, read_manifest
from artifacts.rounds import read_folders
from artifacts.runs import is_committed
from artifacts.shards import read_shard
from artifacts.store import Store
from artifacts.tombstones import refuse_retired
from flows.config import Config, UserError, make_config
from flows.plan import make_plan
from flows.record import config_of, open_run
from flows.report import Report, set_up_logging
from flows.session import Session
from stages.contract import Committed
from stages.update.run import steps_table, tensors_table
from stages.update.trainer_spec import UpdateResult
from stages.update.trainers import Trainers, layout_of, order_of, policy_work

_LAYOUT_FIELDS = {
    "ranks": "resources.update.ranks",
    "sp": "update.sp",
    "threads": "resources.update.threads",
    "max_tokens_per_rank": "update.max_tokens_per_rank",
    "activation_checkpointing": "update.activation_checkpointing",
}


@dataclass(frozen=True)
class Replay:
    """What came out. ``differences`` is empty where all of it is equal, bit by bit.

    Attributes:
        replayed: updates that had to be made again first, from the newest snapshot before.
        layout: what differs of the execution, which alone may move last bits.
    """

    run: str
    iteration: int
    metrics: int
    tensors: int
    replayed: int
    weights_digest: str
    differences: list[str]
    layout: list[str]


def print_replay(
    url: str, iteration: int, overrides: Sequence[str], debug: bool, as_json: bool
) -> None:
    """Replay an update of the run at ``url`` and print the outcome; exits 3 where it differs."""
    set_up_logging()
    found = replay(url, iteration, overrides, debug)
    if as_json:
        print(json.dumps(asdict(found), indent=1))
    else:
        _print(found)
    if found.differences:
        sys.exit(3)


def replay(url: str, iteration: int, overrides: Sequence[str] = (), debug: bool = False) -> Replay:
    """Make the update of ``iteration`` again, under the layout that it was made under.

    Nothing is written. ``overrides`` may ask for another layout.

    Raises:
        UserError: the iteration is not finished.
        RetiredError: ``ratchet gc`` removed what it was made from.
    """
    report = Report()
    session = Session(open_run(make_plan(config_of(url, overrides))), report, debug)
    finished = session.recall_finished()
    if iteration > finished:
        raise UserError(f"run {url} has finished {finished} iterations: {iteration} is not one")
    update = session.history[iteration - 1]
    inputs = update.manifest.inputs
    for folder in (update.folder, *sorted(read_folders(inputs))):
        refuse_retired(session.store, folder)
    config = _laid_out(session.config, update.manifest, overrides)
    session = Session(open_run(make_plan(config)), report, debug)
    try:
        return _replay(session, url, update, iteration)
    finally:
        session.pools.close()
        report.close()


def _replay(session: Session, url: str, update: Committed, iteration: int) -> Replay:
    trainers, store = session.pools.trainers, session.store
    session.recall_all(before=iteration)
    replayed = trainers.bring_to(store, session.history[: iteration - 1])
    result = trainers.update(store, order_of(update.manifest))
    steps, tensors = steps_table(result), tensors_table(result)
    differences = [
        *metric_differences(_stored(store, update, "steps"), steps),
        *_tensor_differences(store, update, tensors, trainers),
        *_digest_differences(update.manifest, result),
    ]
    return Replay(
        run=url,
        iteration=iteration,
        metrics=steps.num_rows,
        tensors=tensors.num_rows,
        replayed=replayed,
        weights_digest=result.weights_digest,
        differences=differences,
        layout=_layout_changes(update.manifest, trainers.layout),
    )


def metric_differences(stored: pa.Table, made: pa.Table) -> list[str]:
    """Metrics whose values differ, in order of step; NaN equals NaN."""
    old, new = ({(r["step"], r["name"]): r["value"] for r in t.to_pylist()} for t in (stored, made))
    lines = []
    for step, name in sorted(old.keys() | new.keys()):
        was, now = old.get((step, name)), new.get((step, name))
        if was != now and not (was != was and now != now):
            lines.append(f"step {step}, {name}: committed {was!r}, replayed {now!r}{_by(was, now)}")
    return lines


def _by(was: float | None, now: float | None) -> str:
    if was is None or now is None:
        return ""
    return f", by {abs(now - was):.3g} ({abs(now - was) / max(abs(was), 1e-300):.3g} of it)"


def _tensor_differences(
    store: Store, update: Committed, made: pa.Table, trainers: Trainers
) -> list[str]:
    stored = {row["name"]: row for row in _stored(store, update, "tensors").to_pylist()}
    new = {row["name"]: row for row in made.to_pylist()}
    odd = [n for n in sorted(stored.keys() | new.keys()) if stored.get(n) != new.get(n)]
    distances: Mapping[str, float] = {}
    if odd and (snapshot := _snapshot(store, update)):
        distances = trainers.distances(store, snapshot)
    return [_tensor_line(n, stored.get(n), new.get(n), distances.get(n)) for n in odd]


def _tensor_line(
    name: str, was: Mapping[str, Any] | None, now: Mapping[str, Any] | None, distance: float | None
) -> str:
    if was is None or now is None:
        return f"tensor {name}: {'not ' if was is None else ''}committed, and replayed" + (
            "" if now else " not"
        )
    far = "" if distance is None else f", entries up to {distance:.3g} apart"
    return f"tensor {name}: norm committed {was['norm']!r}, replayed {now['norm']!r}{far}"


def _digest_differences(manifest: Manifest, result: UpdateResult) -> list[str]:
    outcome = manifest.outcome
    pairs = (
        ("weights", outcome["weights_digest"], result.weights_digest),
        ("critic", outcome.get("critic_digest"), result.critic_digest),
    )
    return [
        f"{what} digest: committed {was}, replayed {now}" for what, was, now in pairs if was != now
    ]


def _stored(store: Store, update: Committed, stem: str) -> pa.Table:
    (shard,) = (s for s in update.manifest.shards if s.name.startswith(f"{stem}."))
    return read_shard(store, update.folder, shard)


def _snapshot(store: Store, update: Committed) -> Ref | None:
    folder = policy_work(update).folder
    return Ref(folder, read_manifest(store, folder).digest) if is_committed(store, folder) else None


def _laid_out(config: Config, manifest: Manifest, overrides: Sequence[str]) -> Config:
    """``config`` with the layout that the update was made under, except where told otherwise."""
    layout = layout_of(manifest)
    told = {override.partition("=")[0] for override in overrides}
    recorded = [
        f"{field}={json.dumps(layout[name])}"
        for name, field in _LAYOUT_FIELDS.items()
        if field not in told
    ]
    return make_config(config.model_dump(mode="json"), recorded, config.url)


def _layout_changes(manifest: Manifest, layout: Mapping[str, Any]) -> list[str]:
    old = layout_of(manifest)
    return [f"{n}: {old.get(n)!r} → {layout[n]!r}" for n in layout if old.get(n) != layout[n]]


def _print(found: Replay) -> None:
    before = f", after {found.replayed} replayed before it" if found.replayed else ""
    if not found.differences:
        print(
            f"iteration {found.iteration}: equal to what is committed: {found.metrics} metrics, "
            f"{found.tensors} tensors, weights {found.weights_digest[:16]}{before}"
        )
        return
    print(f"iteration {found.iteration} differs from what is committed{before}; the first of each:")
    for kind in ("step ", "tensor ", "weights ", "critic "):
        lines = [line for line in found.differences if line.startswith(kind)]
        if lines:
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            print(f"  {lines[0]}{more}")
    if found.layout:
        print(f"made under another layout, which moves last bits: {'; '.join(found.layout)}")
