"""Updates: advantages of all rounds' samples, and optimizer steps that go on from the policy."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.invariants.columns import distinct, fits, holds, is_among, is_finite
from artifacts.invariants.inputs import last_step, policy_of, table_of
from artifacts.manifests import Manifest
from artifacts.rounds import inputs_to_rounds
from artifacts.store import Store

_ADVANTAGES = ("advantage", "token_advantages", "token_returns")


def problems(
    store: Store, folder: str, manifest: Manifest, tables: Sequence[pa.Table | None]
) -> Iterator[str]:
    """See the package's docstring."""
    stems = [shard.name.partition(".")[0] for shard in manifest.shards]
    found = dict(zip(stems, tables, strict=True))
    advantages, step_metrics = found.get("advantages"), found.get("steps")
    if advantages is None or step_metrics is None:
        yield "it has no advantages, or no steps"
        return
    steps = distinct(step_metrics["step"])
    yield from _advantage_problems(advantages, steps)
    rollouts = [table_of(store, rollout) for rollout, _ in inputs_to_rounds(manifest.inputs)]
    if rollouts and all(table is not None for table in rollouts):
        yield from _join_problems(pa.concat_tables(rollouts), advantages)
    yield from _step_problems(steps, last_step(store, manifest.inputs.get("policy")))
    before = policy_of(store, manifest.inputs.get("policy"))
    version = manifest.outcome.get("policy_version")
    if before is not None and version != before.version + 1:
        yield f"it makes policy {version} of policy {before.version}"


def _advantage_problems(table: pa.Table, steps: Sequence[int]) -> Iterator[str]:
    for name in _ADVANTAGES:
        if name in table.column_names and not is_finite(table[name]):
            yield f"{name} holds NaN or an infinity"
    if not is_among(table["weight"], [0.0, 1.0]):
        yield "weight holds another number than 0 and 1"
    elif not holds(pc.equal(pc.is_null(table["advantage"]), pc.equal(table["weight"], 0.0))):
        yield "advantage is not null exactly where weight is 0"
    if steps and not is_among(pc.drop_null(table["step"]), list(steps)):
        yield "a sample was used by a step that is none of its own"
    if not holds(pc.or_(pc.is_valid(table["step"]), pc.equal(table["weight"], 0.0))):
        yield "a sample of weight 1 was used by no step"


def _join_problems(rollout: pa.Table, table: pa.Table) -> Iterator[str]:
    if rollout["sample_id"] != table["sample_id"]:
        yield "its samples are not those of its rollout, in order"
        return
    for name in ("token_advantages", "token_returns"):
        if name in table.column_names and not fits(table[name], rollout["response_ids"]):
            yield f"{name} has not one entry a response token"


def _step_problems(steps: Sequence[int], before: int | None) -> Iterator[str]:
    if not steps:
        return
    first = steps[0] if before is None else before + 1
    if list(steps) != list(range(first, first + len(steps))):
        shown = ", ".join(map(str, steps))
        yield f"its optimizer steps are {shown}, and {first} is where they go on from"
