"""The update stage: scored shards and a policy in, the next policy out.

What is committed is what the update decided: advantages, a metrics row for each optimizer step,
and the digest of the new weights. The weights themselves are kept in snapshots, every so many
iterations; those in between are made again from the committed inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from artifacts import schemas
from artifacts.errors import IntegrityError
from artifacts.keys import source_digest
from artifacts.manifests import Ref
from artifacts.rounds import rounds_to_inputs
from artifacts.shards import write_table
from artifacts.store import Store
from stages.contract import Committed, Product, Progress, Work, find, find_or_make
from stages.ledger import write_ledger
from stages.update.config import UpdateConfig
from stages.update.critic_name import CriticName, critic_of
from stages.update.samples import Samples
from stages.update.shaping import next_kl_coef
from stages.update.trainer_spec import OutOfMemoryError, UpdateResult
from stages.update.trainers import Trainers, policy_work
from stages.user_code import load_function

VERSION = 2


def update_work(
    iteration: int,
    update: UpdateConfig,
    on_null: str,
    temperature: float,
    total_steps: int,
    rounds: Sequence[tuple[Ref, Ref]],
    policy: Ref,
    functions: Mapping[str, str] | None = None,
    before: Committed | None = None,
    groups: int | None = None,
    critic: CriticName | None = None,
) -> Work:
    """The description of an iteration's update of ``policy``.

    Args:
        rounds: rollout and scores of each round.
        total_steps: optimizer steps planned over the run; part of the identity only where the
            learning rate falls towards its end.
        functions: the user's own, config field to source digest.
        before: the update before it, which says how the KL's coefficient has adapted.
        groups: how many make up the batch, where rounds fill it: the first with spread.
        critic: the one that it teaches, where it teaches one.
    """
    identity = {
        **update.identity(),
        "reward_kl_coef": reward_kl_coef(update, before),
        "groups": groups,
        "on_null": on_null,
        "temperature": temperature,
        "total_steps": total_steps if update.has_decay else None,
        "critic": _critic_identity(update, critic),
    }
    if critic is None:
        del identity["critic"]  # nothing of it is in the key of an update without one
    inputs = {**rounds_to_inputs(rounds), "policy": policy}
    return Work("update", "update", VERSION, iteration, identity, inputs, functions or {})


def _critic_identity(update: UpdateConfig, critic: CriticName | None) -> dict[str, Any]:
    assert (update.critic is None) == (critic is None)
    if update.critic is None or critic is None:
        return {}
    return {**update.critic.identity(), **critic.identity()}


def function_digests(update: UpdateConfig) -> dict[str, str]:
    """Config field to source digest, where it names the user's own function.

    Raises:
        ValueError: there is no such function.
    """
    return {
        name: source_digest(load_function(path, name))
        for name, path in update.function_paths().items()
    }


def reward_kl_coef(update: UpdateConfig, before: Committed | None) -> float:
    """Weight of the KL in the reward, in the iteration after the update ``before``."""
    if update.reward_kl_target is None or before is None:
        return update.reward_kl_coef
    # A run that took up its target only now starts from its configuration.
    return float(before.manifest.outcome.get("next_reward_kl_coef", update.reward_kl_coef))


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
    try:
        committed = find_or_make(store, work, lambda: _make(store, work, pool, replayed, progress))
    except OutOfMemoryError:
        if not pool.save_memory():
            raise
        replayed = pool.bring_to(store, history)
        committed = find_or_make(store, work, lambda: _make(store, work, pool, replayed, progress))
    pool.hold(committed)
    return committed


def _make(store: Store, work: Work, pool: Trainers, replayed: int, progress: Progress) -> Product:
    order = pool.order_of(work)
    result = pool.update(store, order)
    progress(samples=len(result.samples), steps=len(result.steps))
    shards = [
        write_table(store, work.folder, "advantages", _advantages(result)),
        write_table(store, work.folder, "steps", steps_table(result)),
        write_table(store, work.folder, "tensors", tensors_table(result)),
    ]
    outcome = {
        "policy_version": work.iteration,
        "weights_digest": result.weights_digest,
        **_adapted(work.identity, result),
        **_taught(work.identity, result),
    }
    entries = [_entry(name, seconds, result) for name, seconds in result.seconds.items()]
    provenance = {
        "ledger": write_ledger(store, work.folder, entries),
        "phases": result.seconds,
        "layout": pool.layout,
        "memory": result.memory,
        "paths": dict(order.paths),
        "replayed": replayed,
        "made": 1,
        "found": 0,
    }
    metrics = {**step_means(result.steps), **result.samples.metrics}
    return Product(shards, outcome, metrics, provenance)


def _adapted(identity: Mapping[str, Any], result: UpdateResult) -> dict[str, float]:
    """The coefficient of the next iteration's KL, where it adapts."""
    if identity["reward_kl_target"] is None:
        return {}
    coef = next_kl_coef(
        identity["reward_kl_coef"],
        result.samples.reward_kl,
        identity["reward_kl_target"],
        identity["reward_kl_horizon"],
        len(result.samples),
    )
    return {"next_reward_kl_coef": coef}


def _taught(identity: Mapping[str, Any], result: UpdateResult) -> dict[str, Any]:
    """The critic that the update leaves to the next one."""
    critic = critic_of(identity)
    if critic is None:
        return {}
    return {"critic_version": critic.version + 1, "critic_digest": result.critic_digest}


def save_snapshot(store: Store, update: Committed, trainers: Trainers) -> Committed:
    """Commit the weights and trainer state that ``trainers`` hold: those after ``update``.

    Of a committed snapshot that has lost a file, the file is made again.

    Raises:
        IntegrityError: a committed snapshot isn't whole, and what is held isn't its content.
    """
    work = policy_work(update)

    def make() -> Product:
        return Product(trainers.save(store, work.folder), work.identity)

    try:
        return find_or_make(store, work, make)
    except IntegrityError:
        # Files are named by their digests: each goes where it was, or beside it as a stranger.
        trainers.save(store, work.folder)
        return find_or_make(store, work, make)


def step_means(steps: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """Means over those of an iteration's optimizer steps that have the metric, as a skipped one
    measures nothing; counts are summed, maxima kept."""
    means: dict[str, float | None] = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step]
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
    rows = [_advantage_row(samples, i, step) for i, step in enumerate(result.step_of_sample)]
    return pa.Table.from_pylist(rows, schema=schemas.ADVANTAGES)


def _advantage_row(samples: Samples, i: int, step: int | None) -> dict[str, Any]:
    is_used = samples.weights_S[i] > 0
    sampled = samples.advantages[i][samples.loss_masks[i] != 0]
    differ = len(sampled) > 0 and sampled.min() != sampled.max()
    # Not the mean of equal numbers, which need not round to them.
    mean = sampled.mean() if differ else sampled[0] if len(sampled) else 0.0
    return {
        "sample_id": samples.ids[i],
        "advantage": float(mean) if is_used else None,
        "weight": float(samples.weights_S[i]),
        "step": step,
        "token_advantages": samples.advantages[i] if is_used and differ else None,
        "token_returns": samples.returns[i] if is_used and samples.returns else None,
    }


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
    """A row for each tensor of the new policy, and of its critic."""
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
