"""Makes a golden run: one iteration, written out by hand, as today's code commits it.

    python tests/golden/make.py tests/golden/v1

A golden run is made once for each version of the schema and never again: ``test_golden.py`` shows
that what it holds can still be read. The digests that this prints go there.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from artifacts import schemas
from artifacts.manifests import Manifest, Ref, Shard, read_manifest, write_manifest
from artifacts.shards import write_shard, write_table
from artifacts.store import Store
from stages.contract import Committed, Work
from stages.ledger import write_ledger
from stages.rollout.config import DataConfig, RolloutConfig
from stages.rollout.prompts import prompt_work
from stages.rollout.run import rollout_work
from stages.score.config import RewardSpec
from stages.update.config import UpdateConfig
from stages.update.snapshot import KINDS, Snapshot, write_snapshot
from stages.update.trainers import policy_work

PROMPTS = [
    {
        "prompt_id": f"{row:064x}",
        "row": row,
        "token_ids": [1, 5 + row, 6],
        "text": f"{row}+1=",
        "ground_truth": f"{row + 1}" if row < 2 else None,
        "extra": json.dumps({"level": row}),
    }
    for row in range(3)
]
# Response, sampler log-probs, finish reason, reward: two samples of each of two prompts.
SAMPLES = [
    ([7, 2], [-0.5, -0.25], "stop", 1.0),
    ([8, 2], [-1.5, -0.125], "stop", 0.0),
    ([9, 9, 9], [-2.0, -3.0, -4.0], "length", None),
    ([], [], "stop", 0.5),
]
ADVANTAGES = [0.5, -0.5, None, 0.0]
FAILURE = json.dumps([{"function": "exact", "type": "ValueError", "message": "not a number: ☃"}])


def commit(
    store: Store, work: Work, shards: list[Shard], ledger: Mapping[str, Any], **product: Any
) -> Ref:
    manifest = Manifest(
        kind=work.kind,
        stage=work.stage,
        stage_version=work.version,
        key=work.key,
        identity=work.identity,
        functions=work.functions,
        inputs=work.inputs,
        shards=tuple(shards),
        provenance={"host": "golden", "seconds": 0.5, "ledger": ledger},
        **product,
    )
    return Ref(work.folder, write_manifest(store, work.folder, manifest).digest)


def ledger_of(store: Store, work: Work, rows: int) -> dict[str, Any]:
    entry = {"unit": "shard-00000", "worker": "worker-0", "start": 1.5e9, "seconds": 0.5}
    return write_ledger(store, work.folder, [{**entry, "rows": rows, "tokens": 7, "bytes": 99}])


def make_prompts(store: Store) -> Ref:
    work = prompt_work(DataConfig(path="prompts.jsonl"), "d" * 64, "e" * 64, 64)
    table = pa.Table.from_pylist(PROMPTS, schema=schemas.PROMPTS)
    shards = [write_shard(store, work.folder, 0, table)]
    return commit(
        store, work, shards, ledger_of(store, work, 3), outcome={"rows": [3], "skipped": [0]}
    )


def make_rollout(store: Store, prompts: Ref, policy: Ref) -> Ref:
    data = DataConfig(path="prompts.jsonl", batch_size=2)
    config = RolloutConfig(samples_per_prompt=2, max_new_tokens=3, stop=["\n", "☃"])
    work = rollout_work(1, data, config, 7, prompts, policy, [], range(2))
    rows = [rollout_row(index) for index in range(len(SAMPLES))]
    tables = [pa.Table.from_pylist(rows[i : i + 2], schema=schemas.ROLLOUTS) for i in (0, 2)]
    shards = [write_shard(store, work.folder, i, table) for i, table in enumerate(tables)]
    metrics = {"rollout/samples": 4, "rollout/response_length_mean": 1.75, "rollout/none": None}
    outcome = {"next_positions": [2]}
    ledger = ledger_of(store, work, 4)
    return commit(store, work, shards, ledger, outcome=outcome, metrics=metrics)


def sample_id(index: int) -> str:
    return f"000001-{index // 2:05d}-{index % 2:03d}"


def rollout_row(index: int) -> dict[str, Any]:
    response, logprobs, reason, _ = SAMPLES[index]
    prompt = PROMPTS[index // 2]
    return {
        "sample_id": sample_id(index),
        "group_id": sample_id(index)[:-4],
        "prompt_id": prompt["prompt_id"],
        "row": prompt["row"],
        "epoch": 0,
        "sample_index": index % 2,
        "seed": 2**62 - 1 - index,
        "prompt_ids": prompt["token_ids"],
        "response_ids": response,
        "logprobs": logprobs,
        "loss_mask": [1] * len(response),
        "finish_reason": reason,
        "text": "☃" * len(response),
        "prompt_text": prompt["text"],
        "ground_truth": prompt["ground_truth"],
        "extra": prompt["extra"],
        "policy_version": 0,
        "policy_digest": "c" * 64,
    }


def make_scores(store: Store, rollout: Ref) -> Ref:
    reward = RewardSpec(fn="my_rewards:exact", weight=2.0)
    identity = {
        "rewards": [reward.identity()],
        "reference": {"digest": "c" * 64, "dtype": "float32"},
    }
    work = Work("scores", "score", 1, 1, identity, {"rollout": rollout}, {"exact": "f" * 64})
    rows = [
        {
            "sample_id": sample_id(index),
            "group_id": sample_id(index)[:-4],
            "reward.exact": value,
            "reward": None if value is None else 2 * value,
            "error": FAILURE if value is None else None,
            "reference_logprobs": [x - 0.5 for x in logprobs],
        }
        for index, (_, logprobs, _, value) in enumerate(SAMPLES)
    ]
    schema = schemas.scores_schema(["exact"])
    tables = [pa.Table.from_pylist(rows[i : i + 2], schema=schema) for i in (0, 2)]
    shards = [write_shard(store, work.folder, i, table) for i, table in enumerate(tables)]
    metrics = {"reward/mean": 1.0, "reward/worst": float("-inf"), "reward/nan": float("nan")}
    return commit(store, work, shards, ledger_of(store, work, 4), metrics=metrics)


def make_update(store: Store, rollout: Ref, scores: Ref, policy: Ref) -> Ref:
    identity = {**UpdateConfig().identity(), "on_null": "drop_sample", "temperature": 1.0}
    inputs = {"rollout": rollout, "scores": scores, "policy": policy}
    work = Work("update", "update", 1, 1, identity, inputs)
    advantages = [
        {"sample_id": sample_id(i), "advantage": a, "weight": float(a is not None), "step": 1}
        for i, a in enumerate(ADVANTAGES)
    ]
    steps = [{"step": 1, "name": "update/loss", "value": 0.125}]
    shards = [
        write_table(store, work.folder, stem, pa.Table.from_pylist(rows, schema=schema))
        for stem, rows, schema in [
            ("advantages", advantages, schemas.ADVANTAGES),
            ("steps", steps, schemas.STEPS),
        ]
    ]
    outcome = {"policy_version": 1, "weights_digest": "9" * 64}
    ledger = ledger_of(store, work, 4)
    return commit(store, work, shards, ledger, outcome=outcome, metrics={"update/loss": 0.125})


def make_policy(store: Store, update: Ref) -> Ref:
    manifest = read_manifest(store, update.path, update.digest)
    work = policy_work(Committed(update.path, manifest, was_reused=True))
    tensors = {
        kind: {
            "embed.weight": np.arange(6, dtype=np.float32).reshape(3, 2) * scale,
            "norm.weight": np.full(2, scale, np.float32),
        }
        for kind, scale in zip(KINDS, (0.5, -0.25, 0.125), strict=True)
    }
    shards = write_snapshot(store, work.folder, Snapshot(tensors, {"step": 1, "taken": 1}))
    return commit(store, work, shards, ledger_of(store, work, 0), outcome=work.identity)


def main(folder: str) -> None:
    if Path(folder).exists():
        sys.exit(f"{folder} exists, and a golden run is never made again: name a new folder")
    store = Store(folder)
    policy = Ref("model", "c" * 64)
    prompts = make_prompts(store)
    rollout = make_rollout(store, prompts, policy)
    scores = make_scores(store, rollout)
    update = make_update(store, rollout, scores, policy)
    for ref in (prompts, rollout, scores, update, make_policy(store, update)):
        print(f"{ref.path} {ref.digest}")


if __name__ == "__main__":
    main(sys.argv[1])
