"""Evaluations: a row a prompt, whose counts are those of the scores that they were taken from."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from artifacts.invariants.inputs import policy_of, table_of
from artifacts.manifests import Manifest
from artifacts.rounds import inputs_to_rounds
from artifacts.store import Store

_COUNTS = ("samples", "known", "right")


def problems(
    store: Store, folder: str, manifest: Manifest, tables: Sequence[pa.Table | None]
) -> Iterator[str]:
    """See the package's docstring."""
    said = {
        row["group_id"]: tuple(row[name] for name in _COUNTS)
        for row in pa.concat_tables(tables).to_pylist()
    }
    pairs = inputs_to_rounds(manifest.inputs)
    scores = [table_of(store, ref) for _, ref in pairs]
    if not any(table is None for table in scores):
        found = _counted(scores, manifest.identity["verdict"])
        for group in sorted({*said, *found}):
            if said.get(group) != found.get(group):
                yield (
                    f"of group {group} it counts {_shown(said.get(group))}, and its scores hold "
                    f"{_shown(found.get(group))}"
                )
                break
    policy = policy_of(store, manifest.inputs.get("policy"))
    for rollout in (table_of(store, ref) for ref, _ in pairs):
        digests = set() if rollout is None else set(rollout["policy_digest"].to_pylist())
        if policy is not None and digests - {policy.digest}:
            yield "its samples are of another policy than the one that it names"
            break


def _counted(scores: Sequence[pa.Table], verdict: float) -> dict[str, tuple[int, int, int]]:
    """Samples of each group, those with a reward, and those that are right."""
    samples: Counter[str] = Counter()
    known: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for row in (row for table in scores for row in _rows(table)):
        group, reward = row["group_id"], row["reward"]
        samples[group] += 1
        if reward is not None:
            known[group] += 1
            right[group] += reward + sum(row["token_rewards"] or ()) >= verdict
    return {group: (count, known[group], right[group]) for group, count in samples.items()}


def _rows(table: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.select(["group_id", "reward", "token_rewards"]).to_pylist()
    return rows


def _shown(counts: tuple[int, ...] | None) -> str:
    if counts is None:
        return "nothing"
    return ", ".join(f"{count} {name}" for count, name in zip(counts, _COUNTS, strict=True))
