"""The evaluation stage: rollouts and scores of held-out prompts in, what they come to out.

An evaluation has parts: a data source, answered in one way. A part's rollout and scores are made as
those of training are; this adds up. A sample is right where its whole reward reaches the verdict's
threshold. One without a reward is neither right nor wrong: it is left out, and counted.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts import schemas
from artifacts.manifests import Ref, read_manifest
from artifacts.rounds import inputs_to_rounds, rounds_to_inputs
from artifacts.runs import evaluation_folder
from artifacts.shards import read_table, write_table
from artifacts.store import Store
from stages.contract import Committed, Product, Work, find_or_make
from stages.groups import group_indices
from stages.pass_at_k import mean_pass_at_k
from stages.totals import float_column, known_mean, total_rewards

VERSION = 1
_ROLLOUT_COLUMNS = ("sample_id", "prompt_id", "response_ids", "finish_reason")


class EvaluationWork(Work):
    """Work of an evaluation lies by the policy that is evaluated, apart from the training."""

    @property
    def folder(self) -> str:
        return f"{evaluation_folder(self.iteration)}/{self.stage}/{self.key[:16]}"


def apart(work: Work) -> EvaluationWork:
    """``work`` of a training stage, as a part of an evaluation."""
    return EvaluationWork(**vars(work))


def evaluation_work(
    version: int,
    parts: Sequence[tuple[str, str]],
    pairs: Sequence[tuple[Ref, Ref]],
    policy: Ref,
    ks: Sequence[int],
    verdict: float,
) -> EvaluationWork:
    """The description of adding up.

    Args:
        version: of the policy.
        parts: data source and mode of each part.
        pairs: rollout and scores of each part.
        ks: the k of each pass@k; of a greedy part, 1 alone counts.
    """
    identity = {
        "parts": [list(part) for part in parts],
        "k": sorted(ks),
        "verdict": verdict,
    }
    inputs = {**rounds_to_inputs(pairs), "policy": policy}
    return EvaluationWork("evaluation", "evaluation", VERSION, version, identity, inputs)


def run(store: Store, work: Work) -> Committed:
    """Add up the parts of ``work``."""
    return find_or_make(store, work, lambda: _make(store, work))


def _make(store: Store, work: Work) -> Product:
    rows: list[dict[str, Any]] = []
    metrics: dict[str, float | None] = {}
    pairs = inputs_to_rounds(work.inputs)
    for (source, mode), refs in zip(work.identity["parts"], pairs, strict=True):
        rollouts, scores = (_read(store, ref) for ref in refs)
        part = prompt_rows(rollouts, scores, work.identity["verdict"])
        ks = [1] if mode == "greedy" else work.identity["k"]
        found = {**part_metrics(part, ks), **sample_metrics(rollouts, scores)}
        prefix = f"evaluate/{source}/" + ("greedy_" if mode == "greedy" else "")
        metrics |= {f"{prefix}{name}": value for name, value in found.items()}
        rows += [{"source": source, "mode": mode, **row} for row in part]
    table = pa.Table.from_pylist(rows, schema=schemas.EVALUATION)
    shard = write_table(store, work.folder, "prompts", table)
    return Product([shard], metrics=metrics, provenance={"made": 1, "found": 0})


def prompt_rows(rollouts: pa.Table, scores: pa.Table, verdict: float) -> list[dict[str, Any]]:
    """A row a prompt, of a part's samples and their scores in the same order."""
    if rollouts["sample_id"] != scores["sample_id"]:
        raise ValueError("the scores are not of the rollout's samples, in order")
    rewards, groups = total_rewards(scores), scores["group_id"].to_pylist()
    prompts = rollouts["prompt_id"].to_pylist()
    rows = []
    for members in group_indices(groups):
        known = rewards[members][~np.isnan(rewards[members])]
        rows.append(
            {
                "group_id": groups[members[0]],
                "prompt_id": prompts[members[0]],
                "samples": len(members),
                "known": len(known),
                "right": int((known >= verdict).sum()),
                "reward": float(known.mean()) if len(known) else None,
            }
        )
    return rows


def part_metrics(rows: Sequence[Mapping[str, Any]], ks: Sequence[int]) -> dict[str, float | None]:
    """pass@k over prompts, of the samples that are known, and the prompts that have too few."""
    counts = [(row["known"], row["right"]) for row in rows]
    metrics: dict[str, float | None] = {}
    for k in ks:
        value, left_out = mean_pass_at_k(counts, k)
        metrics[f"pass_at_{k}"] = value
        metrics[f"pass_at_{k}_left_out_prompts"] = left_out
    return {**metrics, "prompts": len(rows)}


def sample_metrics(rollouts: pa.Table, scores: pa.Table) -> dict[str, float | None]:
    """Rewards, lengths in tokens, and shares, of a part's samples."""
    rewards = {"reward_mean": total_rewards(scores)}
    for name in scores.column_names:
        if name.startswith("reward."):
            rewards[name] = float_column(scores[name])
    lengths = pc.list_value_length(rollouts["response_ids"])
    cut = pc.equal(rollouts["finish_reason"], "length")
    return {
        **{name: known_mean(values) for name, values in rewards.items()},
        "samples": rollouts.num_rows,
        "null_samples": int(np.isnan(rewards["reward_mean"]).sum()),
        "error_samples": scores.num_rows - scores["error"].null_count,
        "response_length_mean": pc.mean(lengths).as_py(),
        "truncated_share": pc.sum(cut).as_py() / rollouts.num_rows,
    }


def _read(store: Store, ref: Ref) -> pa.Table:
    manifest = read_manifest(store, ref.path, ref.digest)
    columns = None if manifest.kind == "scores" else _ROLLOUT_COLUMNS
    return read_table(store, ref.path, manifest, columns)
