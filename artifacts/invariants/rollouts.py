"""Rollouts: what was sampled is whole token by token, once, and by the policy that is named.

What the data gave has none of a sampler's columns, and all of the others.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.invariants.columns import (
    distinct,
    fits,
    has_doubles,
    holds,
    is_among,
    is_at_most,
    is_finite,
    is_whole,
)
from artifacts.invariants.inputs import policy_of
from artifacts.manifests import Manifest
from artifacts.schemas import FINISH_REASONS
from artifacts.store import Store

_OF_A_TOKEN = ("logprobs", "loss_mask")
_OF_A_SAMPLER = ("logprobs", "seed", "policy_version", "policy_digest")


def problems(
    store: Store, folder: str, manifest: Manifest, tables: Sequence[pa.Table | None]
) -> Iterator[str]:
    """See the package's docstring."""
    table = pa.concat_tables(tables)
    are_given = "given" in manifest.identity
    yield from _origin_problems(are_given, table)
    yield from _token_problems(are_given, table)
    yield from _sample_problems(manifest, table)
    yield from _policy_problems(store, manifest, table)


def _origin_problems(are_given: bool, table: pa.Table) -> Iterator[str]:
    """Where a sample says otherwise than its manifest whether it was given or sampled."""
    origin = "given" if are_given else "sampled"
    if not holds(pc.equal(pc.equal(table["finish_reason"], "given"), are_given)):
        yield f"its responses were {origin}, and a finish_reason says otherwise"
    for name in _OF_A_SAMPLER if are_given else ("seed",):
        if table[name].null_count != (table.num_rows if are_given else 0):
            yield f"its responses were {origin}, and {name} is {'known' if are_given else 'null'}"


def _token_problems(are_given: bool, table: pa.Table) -> Iterator[str]:
    tokens = table["response_ids"]
    for name in _OF_A_TOKEN:
        is_missing = not is_whole(table[name]) and not (are_given and name in _OF_A_SAMPLER)
        if is_missing or not fits(table[name], tokens):
            yield f"{name} has not one entry a response token"
    if not is_finite(table["logprobs"]):
        yield "logprobs holds NaN or an infinity"
    elif not is_at_most(table["logprobs"], 0.0):
        yield "logprobs holds a number above 0"
    if not is_among(table["loss_mask"], [0, 1]):
        yield "loss_mask holds another number than 0 and 1"
    elif not _has_own_tokens(table["loss_mask"]):
        yield "a response has tokens, and loss_mask none of the policy's"


def _has_own_tokens(masks: pa.ChunkedArray) -> bool:
    """Whether every mask that has entries has a 1 among them."""
    chosen = {"sample": pc.list_parent_indices(masks), "mask": pc.list_flatten(masks)}
    sums = pa.table(chosen).group_by("sample").aggregate([("mask", "sum")])
    return holds(pc.greater(sums["mask_sum"], 0))


def _sample_problems(manifest: Manifest, table: pa.Table) -> Iterator[str]:
    if not is_among(table["finish_reason"], list(FINISH_REASONS)):
        yield f"a finish_reason is none of {', '.join(FINISH_REASONS)}"
    for name in ("sample_id", "seed"):
        if has_doubles(pc.drop_null(table[name])):
            yield f"a {name} stands twice"
    wanted = manifest.identity.get("samples_per_prompt")
    sizes = Counter(table["group_id"].to_pylist())
    short = [group for group, size in sizes.items() if wanted is not None and size != wanted]
    if short:
        yield f"group {short[0]} has {sizes[short[0]]} samples, not {wanted}"


def _policy_problems(store: Store, manifest: Manifest, table: pa.Table) -> Iterator[str]:
    policy = policy_of(store, manifest.inputs.get("policy"))
    if policy is None:
        return
    for name, expected in (("policy_digest", policy.digest), ("policy_version", policy.version)):
        found = distinct(table[name])
        if found != [expected] or not is_whole(table[name]):
            shown = ", ".join(str(value) or "empty" for value in found) or "null"
            yield f"its {name} is {shown}, and its policy's is {expected}"
