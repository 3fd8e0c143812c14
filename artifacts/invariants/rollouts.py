"""Rollouts: what was sampled is whole token by token, once, and by the policy that is named."""

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


def problems(
    store: Store, folder: str, manifest: Manifest, tables: Sequence[pa.Table | None]
) -> Iterator[str]:
    """See the package's docstring."""
    table = pa.concat_tables(tables)
    yield from _token_problems(table)
    yield from _sample_problems(manifest, table)
    yield from _policy_problems(store, manifest, table)


def _token_problems(table: pa.Table) -> Iterator[str]:
    tokens = table["response_ids"]
    for name in _OF_A_TOKEN:
        column = table[name]
        if not is_whole(column) or not fits(column, tokens):
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
        if has_doubles(table[name]):
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
