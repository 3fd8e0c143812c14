"""A run's committed records written by hand: tiny tables, known numbers, nothing heavy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from artifacts import schemas
from artifacts.manifests import Ref, Shard, read_manifest
from artifacts.runs import committed
from artifacts.schemas import scores_schema
from artifacts.shards import write_file, write_shard, write_table
from artifacts.store import Store
from flows.config import Config
from flows.iteration import Iteration, Round
from flows.plan import Plan
from flows.record import open_run
from flows.revisions import Run
from flows.session import Session
from stages.contract import Committed, Product, Work, find_or_make
from stages.rollout.prompts import prompt_work
from stages.update import snapshot
from stages.update.trainers import policy_work

PROMPTS, PER_PROMPT = 2, 4
REWARDS: tuple[float | None, ...] = (0.0, 1.0, 0.5, 0.0, 1.0, 1.0, 1.0, 0.25)


def small_plan(folder: Path, iterations: int = 2, run: str = "small", **tracking: Any) -> Plan:
    """The plan of a run in ``folder``; its model and data are names alone."""
    config = Config.model_validate(
        {
            "run": run,
            "store": str(folder),
            "model": "models/tiny",
            "iterations": iterations,
            "data": {"path": "prompts/sums.jsonl", "batch_size": PROMPTS},
            "rollout": {"samples_per_prompt": PER_PROMPT},
            "score": {"rewards": [{"fn": "rewards.py:exact"}, {"fn": "rewards.py:brief"}]},
            "tracking": tracking,
        }
    )
    digests = {"exact": "e" * 64, "brief": "b" * 64}
    return Plan(config, 64, 32, "a" * 64, "c" * 64, "d" * 64, digests)


def small_run(
    plan: Plan, iterations: Sequence[int] = (1, 2), **options: Any
) -> tuple[Store, dict[int, Iteration]]:
    """A run with ``iterations`` committed."""
    store = open_run(plan).store
    return store, {i: write_iteration(store, i, **options) for i in iterations}


def finished_run(plan: Plan) -> Run:
    """A run whose every iteration is committed, under the keys that a session looks for.

    Two shards of a few bytes a stage: what a session recalls is read from manifests alone.
    """
    run = open_run(plan)
    session = Session(run)
    prompts = prompt_work(
        plan.config.data, plan.data_digest, plan.tokenizer_digest, plan.max_prompt_tokens
    )
    _commit_bytes(run.store, prompts, rows=[PROMPTS], skipped=0)
    for iteration in range(1, plan.config.iterations + 1):
        seen = session.iterations[iteration] = Iteration()
        work = session.rollout_work(iteration)
        rollout = _commit_bytes(run.store, work, next_positions=[iteration * PROMPTS])
        seen.rounds.append(Round(rollout))
        scores = _commit_bytes(run.store, session.score_work(iteration))
        seen.rounds[0] = Round(rollout, scores)
        outcome = {"policy_version": iteration, "weights_digest": f"{iteration:064x}"}
        seen.update = _commit_bytes(run.store, session.update_work(iteration), **outcome)
        session.history.append(seen.update)
    return run


def _commit_bytes(store: Store, work: Work, **outcome: Any) -> Committed:
    def make() -> Product:
        parts = (write_file(store, work.folder, f"shard-{n:05d}", "arrow", b"rows") for n in (0, 1))
        return Product(list(parts), outcome)

    return find_or_make(store, work, make)


def write_iteration(
    store: Store,
    iteration: int,
    rewards: Sequence[float | None] = REWARDS,
    texts: Sequence[str] | None = None,
    **metrics: float,
) -> Iteration:
    """Commit an iteration's rollout, scores and update; ``metrics`` go to the update's."""
    rollout = write_rollout(store, iteration, texts or [str(n) for n in range(len(rewards))])
    scores = write_scores(store, iteration, rollout, rewards)
    update = write_update(store, iteration, rollout, scores, **metrics)
    return Iteration([Round(rollout, scores)], update)


def write_rollout(store: Store, iteration: int, texts: Sequence[str]) -> Committed:
    """Two shards of samples, prompt by prompt."""
    policy = policy_before(store, iteration)
    version, digest = _weights_of(store, policy)
    rows = [
        {**_sample(iteration, n, text), "policy_version": version, "policy_digest": digest}
        for n, text in enumerate(texts)
    ]
    tokens = sum(len(row["response_ids"]) for row in rows)
    work = Work("rollouts", "rollout", 1, iteration, {}, {"policy": policy})
    metrics = {"rollout/samples": len(rows), "rollout/response_tokens": tokens}
    return _commit(store, work, pa.Table.from_pylist(rows, schema=schemas.ROLLOUTS), metrics)


def write_scores(
    store: Store, iteration: int, rollout: Committed, rewards: Sequence[float | None]
) -> Committed:
    """A score a sample; where it is None, an error record too."""
    rows = [
        {
            "sample_id": _sample_id(iteration, n),
            "group_id": _group_id(iteration, n),
            "reward.exact": reward,
            "reward.brief": 0.0,
            "reward": reward,
            "error": '[{"function": "exact", "type": "KeyError"}]' if reward is None else None,
        }
        for n, reward in enumerate(rewards)
    ]
    known = [reward for reward in rewards if reward is not None]
    table = pa.Table.from_pylist(rows, schema=scores_schema(["exact", "brief"]))
    work = Work("scores", "score", 1, iteration, {}, {"rollout": rollout.ref})
    return _commit(store, work, table, {"reward/mean": sum(known) / len(known)})


def write_update(
    store: Store, iteration: int, rollout: Committed, scores: Committed, **metrics: float
) -> Committed:
    """An update that left the last sample out."""
    policy = policy_before(store, iteration)
    version, _ = _weights_of(store, policy)
    count = rollout.manifest.rows
    ids = [_sample_id(iteration, n) for n in range(count)]
    values = [*(float(n) for n in range(count - 1)), None]
    rows = [
        {"sample_id": name, "advantage": a, "weight": float(a is not None), "step": version + 1}
        for name, a in zip(ids, values, strict=True)
    ]
    advantages = pa.Table.from_pylist(rows, schema=schemas.ADVANTAGES)
    step = {"step": version + 1, "name": "update/loss", "value": 0.5 / iteration}
    steps = pa.Table.from_pylist([step], schema=schemas.STEPS)
    inputs = {"rollout": rollout.ref, "scores": scores.ref, "policy": policy}
    work = Work("update", "update", 1, iteration, {}, inputs)

    def make() -> Product:
        shards = [
            write_table(store, work.folder, "advantages", advantages),
            write_table(store, work.folder, "steps", steps),
        ]
        values = {
            "update/loss": 0.5 / iteration,
            "update/grad_norm": 2.0,
            "update/trained_samples": count - 1,
            "update/trained_tokens": 3 * (count - 1),
        }
        named = {name.replace("__", "/"): value for name, value in metrics.items()}
        outcome = {"policy_version": version + 1, "weights_digest": f"{iteration:064x}"}
        return Product(shards, outcome, {**values, **named}, {"phases": {"steps": 0.25}})

    return find_or_make(store, work, make)


def write_snapshot(store: Store, update: Committed) -> Committed:
    """The policy after ``update``: one weight, at 0."""
    work = policy_work(update)
    tensors = {kind: {"w": np.zeros(1, np.float32)} for kind in snapshot.KINDS}
    step = int(update.manifest.outcome["policy_version"])

    def make() -> Product:
        state = snapshot.Snapshot(tensors, {"step": step, "taken": step})
        return Product(snapshot.write_snapshot(store, work.folder, state))

    return find_or_make(store, work, make)


def policy_before(store: Store, iteration: int) -> Ref:
    """What an iteration starts from: the update before it, or the base model."""
    for folder, manifest in committed(store, iteration - 1, "update"):
        return Ref(folder, manifest.digest)
    return Ref("model", "0" * 64)


def _weights_of(store: Store, policy: Ref) -> tuple[int, str]:
    """The version and the weights' digest of ``policy``."""
    if policy.path == "model":
        return 0, policy.digest
    outcome = read_manifest(store, policy.path).outcome
    return outcome["policy_version"], outcome["weights_digest"]


def _commit(store: Store, work: Work, table: pa.Table, metrics: dict[str, float]) -> Committed:
    def make() -> Product:
        half = table.num_rows // 2
        shards: list[Shard] = [
            write_shard(store, work.folder, 0, table.slice(0, half)),
            write_shard(store, work.folder, 1, table.slice(half)),
        ]
        return Product(shards, metrics=metrics, provenance={"made": 2, "found": 0})

    return find_or_make(store, work, make)


def _group_id(iteration: int, n: int) -> str:
    return f"{iteration:06d}-{n // PER_PROMPT:05d}"


def _sample_id(iteration: int, n: int) -> str:
    return f"{_group_id(iteration, n)}-{n % PER_PROMPT:03d}"


def _sample(iteration: int, n: int, text: str) -> dict[str, Any]:
    length = 1 + n % 3
    return {
        "sample_id": _sample_id(iteration, n),
        "group_id": _group_id(iteration, n),
        "prompt_id": f"p{n // PER_PROMPT}",
        "row": n // PER_PROMPT,
        "epoch": 0,
        "sample_index": n % PER_PROMPT,
        "seed": n,
        "prompt_ids": [1, 2],
        "response_ids": [3] * length,
        "logprobs": [-0.5] * length,
        "loss_mask": [1] * length,
        "finish_reason": "stop",
        "text": text,
        "prompt_text": f"{n // PER_PROMPT}+1=",
        "ground_truth": f"0{n // PER_PROMPT + 1}",
        "extra": "{}",
    }
