"""The rollout stage: policy and prompts in, rollout shards out.

A shard's membership is fixed by group index before anything is sampled, and every sample has a
seed of its own, so a shard is the same whichever engine makes it, and whichever attempt.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import pyarrow.compute as pc

from artifacts.keys import key_of
from artifacts.manifests import Ref, Shard
from artifacts.shards import find_shards, read_shards
from artifacts.store import Store
from stages.contract import Committed, Product, Progress, StageError, Work, find_or_make
from stages.ledger import write_ledger
from stages.rollout.config import PAIR, DataConfig, RolloutConfig
from stages.rollout.given import given_columns
from stages.rollout.prompts import PromptSet
from stages.rollout.selection import Selected, Selection, select
from stages.rollout.worker import Finished, PolicyName, Sample, ShardOrder

VERSION = 1
_MEASURED = {"prompt_ids", "response_ids", "logprobs", "finish_reason"}


class Source(Protocol):
    """Where samples come from: engines, or data that holds them."""

    def generate(
        self, store: Store, folder: str, policy: PolicyName, orders: Sequence[ShardOrder]
    ) -> Iterator[Sample | Finished]:
        """Write the shards of ``orders`` into ``folder``; yields progress as it comes."""


def rollout_work(
    iteration: int,
    data: DataConfig,
    rollout: RolloutConfig,
    seed: int,
    prompts: Ref,
    policy: Ref | None,
    start: Sequence[int],
    groups: range,
    number: int = 1,
) -> Work:
    """The description of a round of an iteration's rollout.

    Args:
        policy: what samples; None where the data holds the responses.
        start: prompts drawn before, of each source; [] at the beginning.
        groups: indices of the groups that it draws; they go on counting from round to round.
        number: of the round, from 1.
    """
    weights = [source.weight for source in data.all_sources]
    identity = {
        **(rollout.given_identity() if data.has_pairs else rollout.sampling_identity()),
        "round": number,
        "first_group": groups.start,
        "groups": len(groups),
        "shuffle": data.shuffle,
        "seed": seed,
        "start": list(start) or [0] * len(weights),
        "weights": weights,
        "logprobs": "natural log of the processed distribution, float32",
    }
    inputs = {"prompts": prompts}
    if data.has_pairs:
        identity |= {"logprobs": None, "given": list(PAIR)}
    if policy is not None:
        inputs["policy"] = policy
    return Work("rollouts", "rollout", VERSION, iteration, identity, inputs)


def run(
    store: Store,
    work: Work,
    prompts: PromptSet,
    policy: PolicyName,
    source: Callable[[], Source],
    progress: Progress,
) -> Committed:
    """Sample the round's groups. ``source`` is called only where something is missing."""
    return find_or_make(store, work, lambda: _make(store, work, prompts, policy, source, progress))


def _make(
    store: Store,
    work: Work,
    prompts: PromptSet,
    policy: PolicyName,
    source: Callable[[], Source],
    progress: Progress,
) -> Product:
    selection = selection_of(work, prompts)
    orders = list(shard_orders(work, prompts, selection.rows))
    shards = find_shards(store, work.folder, [order.index for order in orders])
    missing = [order for order in orders if order.index not in shards]
    num_found = len(shards)
    progress(total=sum(len(order.samples) for order in missing), found=num_found)
    entries: list[Mapping[str, Any]] = []
    if missing:
        for event in source().generate(store, work.folder, policy, missing):
            if isinstance(event, Finished):
                shards[event.index] = event.shard
                entries.append(event.entry)
                progress(shard=event.index, rows=event.shard.rows, tokens=event.entry["tokens"])
            else:
                progress(samples=1, tokens=event.tokens)
    whole = _all_of(orders, shards)
    outcome = {"next_positions": selection.next_positions}
    provenance = {
        "ledger": write_ledger(store, work.folder, entries),
        "made": len(entries),
        "found": num_found,
    }
    return Product(whole, outcome, rollout_metrics(store, work.folder, whole), provenance)


def selection_of(work: Work, prompts: PromptSet) -> Selection:
    """The rows of a round, and where the next one begins."""
    identity = work.identity
    return select(
        prompts.num_rows,
        identity["weights"],
        identity["seed"],
        identity["start"],
        identity["groups"],
        identity["shuffle"],
    )


def shard_orders(
    work: Work, prompts: PromptSet, chosen: Sequence[Selected]
) -> Iterator[ShardOrder]:
    """The shards of a round, sample by sample, before anything is sampled."""
    identity = work.identity
    rows = list(prompts.take(chosen))
    per_shard = identity["prompts_per_shard"]
    for index, first in enumerate(range(0, len(chosen), per_shard)):
        groups = range(first, min(first + per_shard, len(chosen)))
        samples = [
            _sample(work, group, chosen[group].epoch, rows[group], k)
            for group in groups
            for k in range(identity["samples_per_prompt"])
        ]
        yield ShardOrder(index, samples)


def _sample(
    work: Work, group: int, epoch: int, prompt: Mapping[str, Any], k: int
) -> dict[str, Any]:
    # By place and not by text: the same prompt may stand in the data twice.
    group_id = f"{work.iteration:06d}-{work.identity['first_group'] + group:05d}"
    sample_id = f"{group_id}-{k:03d}"
    position = sum(work.identity["start"]) + group
    return {
        "sample_id": sample_id,
        "group_id": group_id,
        "prompt_id": prompt["prompt_id"],
        "source": prompt["source"],
        "row": prompt["row"],
        "epoch": epoch,
        "sample_index": k,
        "seed": sample_seed(work.identity["seed"], position, k),
        "prompt_ids": prompt["token_ids"],
        "prompt_text": prompt["text"],
        "ground_truth": prompt["ground_truth"],
        "extra": prompt["extra"],
        "messages": prompt.get("messages"),
        **given_columns(prompt, k),
    }


def sample_seed(seed: int, position: int, k: int) -> int:
    """The sampler's seed of sample ``k`` at a prompt position: 62 bits, never the same twice."""
    return int(key_of({"seed": seed, "position": position, "sample": k})[:16], 16) >> 2


def _all_of(orders: Sequence[ShardOrder], shards: Mapping[int, Shard]) -> list[Shard]:
    for order in orders:
        shard = shards.get(order.index)
        if shard is None or shard.rows != len(order.samples):
            found = "nothing" if shard is None else f"{shard.rows} rows"
            raise StageError(
                f"rollout shard {order.index}: expected {len(order.samples)} samples, found {found}"
            )
    return [shards[order.index] for order in orders]


def rollout_metrics(store: Store, folder: str, shards: Sequence[Shard]) -> dict[str, float | None]:
    """Statistics of an iteration's samples, for people. Holds one shard at a time."""
    samples = prompt_tokens = tokens = longest = 0
    reasons: Counter[str] = Counter()
    logprob_sum, is_sampled = 0.0, False
    for table in read_shards(store, folder, shards, _MEASURED):
        lengths = pc.list_value_length(table["response_ids"])
        samples += table.num_rows
        tokens += pc.sum(lengths).as_py()
        longest = max(longest, pc.max(lengths).as_py())
        prompt_tokens += pc.sum(pc.list_value_length(table["prompt_ids"])).as_py()
        reasons.update(table["finish_reason"].to_pylist())
        logprob_sum += pc.sum(pc.list_flatten(table["logprobs"])).as_py() or 0.0
        is_sampled |= table["logprobs"].null_count == 0
    return {
        "rollout/samples": samples,
        "rollout/prompt_tokens": prompt_tokens,
        "rollout/response_tokens": tokens,
        "rollout/response_length_mean": tokens / samples,
        "rollout/response_length_max": longest,
        "rollout/truncated_share": reasons["length"] / samples,
        "rollout/sampled_logprob_mean": logprob_sum / max(tokens, 1) if is_sampled else None,
    }
