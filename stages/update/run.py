"""The update stage: scored shards and a policy in, the next policy out.

What is committed is what the update decided: advantages, a metrics row for each optimizer step,
and the digest of the new weights. The weights themselves are kept in snapshots, every so many
iterations; those in between are made again from the committed inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from artifacts import schemas
from artifacts.manifests import Ref
from artifacts.shards import write_table
from artifacts.store import Store
from stages.contract import Committed, Product, Progress, Work, find, find_or_make
from stages.ledger import write_ledger
from stages.update.config import UpdateConfig
from stages.update.trainer_spec import UpdateOrder, UpdateResult
from stages.update.trainers import Trainers, policy_work

VERSION = 1


def update_work(
    iteration: int,
    update: UpdateConfig,
    on_null: str,
    temperature: float,
    total_steps: int,
    rollout: Committed,
    scores: Committed,
    policy: Ref,
) -> Work:
    """The description of an iteration's update of ``policy``.

    Args:
        total_steps: optimizer steps planned over the run; part of the identity only where the
            learning rate falls towards its end.
    """
    identity = {
        **update.identity(),
        "on_null": on_null,
        "temperature": temperature,
        "total_steps": None if update.lr_schedule == "constant" else total_steps,
    }
    inputs = {"rollout": rollout.ref, "scores": scores.ref, "policy": policy}
    return Work("update", "update", VERSION, iteration, identity, inputs)


def run(
    store: Store,
    work: Work,
    history: Sequence[Committed],
    num_samples: int,
    trainers: Callable[[], Trainers],
    progress: Progress,
) -> Committed:
    """Make the policy after ``history`` into the next one.

    ``trainers`` is called only where the update is not committed.
    """
    if found := find(store, work):
        return found
    pool = trainers()
    replayed = pool.bring_to(store, history)
    progress(total=num_samples)
    committed = find_or_make(store, work, lambda: _make(store, work, pool, replayed, progress))
    pool.hold(committed)
    return committed


def _make(store: Store, work: Work, pool: Trainers, replayed: int, progress: Progress) -> Product:
    order = UpdateOrder(work.inputs["rollout"], work.inputs["scores"], work.identity)
    result = pool.update(store, order)
    progress(samples=len(result.samples), steps=len(result.steps))
    shards = [
        write_table(store, work.folder, "advantages", _advantages(result)),
        write_table(store, work.folder, "steps", steps_table(result)),
        write_table(store, work.folder, "tensors", tensors_table(result)),
    ]
    outcome = {"policy_version": work.iteration, "weights_digest": result.weights_digest}
    entries = [_entry(name, seconds, result) for name, seconds in result.seconds.items()]
    provenance = {
        "ledger": write_ledger(store, work.folder, entries),
        "phases": result.seconds,
        "layout": pool.layout,
        "replayed": replayed,
        "made": 1,
        "found": 0,
    }
    return Product(shards, outcome, step_means(result.steps), provenance)


def save_snapshot(store: Store, update: Committed, trainers: Trainers) -> Committed:
    """Commit the weights and trainer state that ``trainers`` hold: those after ``update``."""
    work = policy_work(update)

    def make() -> Product:
        return Product(trainers.save(store, work.folder), work.identity)

    return find_or_make(store, work, make)


def step_means(steps: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """Means over an iteration's optimizer steps; counts are summed, maxima kept."""
    means: dict[str, float | None] = {}
    for name in steps[0]:
        values = [step[name] for step in steps]
        if name == "step":
            means["update/steps_finished"] = max(values)
        elif name.endswith(("_samples", "_tokens", "_steps")):
            means[name] = sum(values)
        elif name.endswith("_max"):
            means[name] = max(values)
        else:
            means[name] = sum(values) / len(values)
    return means


def _advantages(result: UpdateResult) -> pa.Table:
    samples = result.samples
    used = samples.weights_S > 0
    columns = {
        "sample_id": samples.ids,
        "advantage": [
            float(a) if u else None for a, u in zip(samples.advantages_S, used, strict=True)
        ],
        "weight": samples.weights_S.tolist(),
        "step": result.step_of_sample,
    }
    return pa.Table.from_pydict(columns, schema=schemas.ADVANTAGES)


def steps_table(result: UpdateResult) -> pa.Table:
    """A row for each metric of each optimizer step."""
    rows = [
        {"step": int(step["step"]), "name": name, "value": float(value)}
        for step in result.steps
        for name, value in step.items()
        if name != "step"
    ]
    return pa.Table.from_pylist(rows, schema=schemas.STEPS)


def tensors_table(result: UpdateResult) -> pa.Table:
    """A row for each tensor of the new policy."""
    return pa.Table.from_pylist(result.tensors, schema=schemas.TENSORS)


def _entry(phase: str, seconds: float, result: UpdateResult) -> dict[str, Any]:
    trained = sum(step["update/trained_tokens"] for step in result.steps)
    return {
        "unit": phase,
        "worker": "trainer-0",
        "start": None,
        "seconds": seconds,
        "rows": len(result.samples),
        "tokens": int(trained) if phase == "steps" else 0,
        "bytes": 0,
    }
