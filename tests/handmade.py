"""Committed rollouts and scores without an engine: what an update reads, with known numbers."""

import json
import random
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from artifacts import schemas
from artifacts.manifests import Ref
from artifacts.rounds import rounds_to_inputs
from artifacts.runs import committed
from artifacts.schemas import scores_schema
from artifacts.shards import write_shard
from artifacts.store import Store
from stages.contract import Committed, Product, Work, find_or_make
from stages.ledger import write_ledger


def commit(store: Store, work: Work, table: pa.Table, **product) -> Committed:
    """Commit ``table`` as the two shards of ``work``."""

    def make() -> Product:
        half = table.num_rows // 2
        parts = [table.slice(0, half), table.slice(half)]
        shards = [write_shard(store, work.folder, i, part) for i, part in enumerate(parts)]
        provenance = {"ledger": write_ledger(store, work.folder, []), "made": 2, "found": 0}
        return Product(shards, provenance=provenance, **product)

    return find_or_make(store, work, make)


def commit_iteration(
    store: Store,
    iteration: int,
    groups: int = 6,
    per_group: int = 4,
    nulls: int = 2,
    change: Callable[[list[dict]], None] = lambda scores: None,
    seed: int | None = None,
) -> tuple[Committed, Committed]:
    """A rollout and its scores: random tokens, one group without spread, some null rewards.

    ``change`` gets the score rows before they are written. Of one ``seed``, iterations are alike;
    it is the iteration's number where none is given.
    """
    rng = random.Random(iteration if seed is None else seed)
    policy, digest = policy_before(store, iteration)
    rows = [_row(rng, iteration, g, k, digest) for g in range(groups) for k in range(per_group)]
    table = pa.Table.from_pylist(rows, schema=schemas.ROLLOUTS)
    inputs = {"policy": policy}
    work = Work("rollouts", "rollout", 1, iteration, {"start": 0, "max_new_tokens": 8}, inputs)
    rollout = commit(store, work, table, outcome={"next_positions": [groups]})
    scores = []
    for index, row in enumerate(rows):
        reward = 1.0 if row["group_id"].endswith("00000") else float(rng.random() < 0.5)
        scores.append(
            {
                "sample_id": row["sample_id"],
                "group_id": row["group_id"],
                "reward": None if index >= len(rows) - nulls else reward,
                "reference_logprobs": np.array(row["logprobs"], np.float32) - 0.1,
            }
        )
    change(scores)
    scored = pa.Table.from_pylist(scores, schema=scores_schema([]))
    work = Work("scores", "score", 1, iteration, {"rewards": []}, {"rollout": rollout.ref})
    return rollout, commit(store, work, scored)


def policy_before(store: Store, iteration: int) -> tuple[Ref, str]:
    """What an iteration starts from, and the digest of its weights."""
    for folder, manifest in committed(store, iteration - 1, "update"):
        return Ref(folder, manifest.digest), manifest.outcome["weights_digest"]
    return Ref("model", "0" * 64), "0" * 64


def inputs_of(rollout: Committed, scores: Committed) -> dict[str, Ref]:
    """What an update of the policy that sampled reads."""
    policy = rollout.manifest.inputs["policy"]
    return {**rounds_to_inputs([(rollout.ref, scores.ref)]), "policy": policy}


def _row(rng: random.Random, iteration: int, group: int, k: int, policy: str) -> dict:
    length = rng.randrange(1, 9)
    group_id = f"{iteration:06d}-{group:05d}"
    prompt = [1, *((group * 7 + n) % 40 + 4 for n in range(3 + group))]
    return {
        "sample_id": f"{group_id}-{k:03d}",
        "group_id": group_id,
        "prompt_id": str(group),
        "row": group,
        "epoch": 0,
        "sample_index": k,
        "seed": 1000 * group + k,
        "prompt_ids": prompt,
        "response_ids": [rng.randrange(4, 44) for _ in range(length)],
        "logprobs": [-rng.random() * 5 for _ in range(length)],
        "loss_mask": [1] * length,
        "finish_reason": "stop",
        "text": "",
        "prompt_text": "",
        "ground_truth": None,
        "extra": json.dumps({}),
        "policy_version": iteration - 1,
        "policy_digest": policy,
    }
