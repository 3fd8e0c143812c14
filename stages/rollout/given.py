"""Responses that the data holds, as rollout shards: no engine is loaded, and nothing is sampled.

What there is no sampler of is null: its log-probs, its seed, and the policy that it sampled with.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from artifacts import schemas
from artifacts.shards import write_shard
from artifacts.store import Store
from stages.rollout.config import PAIR
from stages.rollout.worker import Finished, PolicyName, ShardOrder

_OF_A_SAMPLER = ("logprobs", "seed", "policy_version", "policy_digest")


def given_columns(prompt: Mapping[str, Any], sample_index: int) -> dict[str, Any]:
    """What a sample's record holds of the response; empty where it is to be sampled."""
    which = PAIR[sample_index] if "chosen_ids" in prompt else None
    if which is None:
        return {}
    return {
        "seed": None,
        "response_ids": prompt[f"{which}_ids"],
        "text": prompt[f"{which}_text"],
    }


class GivenResponses:
    """Stands where engines do, for orders whose samples hold their responses."""

    def generate(
        self, store: Store, folder: str, policy: PolicyName, orders: Sequence[ShardOrder]
    ) -> Iterator[Finished]:
        """Write each order's shard. ``policy`` has no part in it."""
        for order in orders:
            start = time.time()
            table = _table(order.samples)
            shard = write_shard(store, folder, order.index, table)
            entry = {
                "unit": f"shard-{order.index:05d}",
                "worker": f"driver:{os.getpid()}",
                "start": start,
                "seconds": time.time() - start,
                "rows": shard.rows,
                "tokens": sum(len(sample["response_ids"]) for sample in order.samples),
                "bytes": shard.bytes,
            }
            yield Finished(order.index, shard, entry)


def _table(samples: Sequence[Mapping[str, Any]]) -> pa.Table:
    columns: dict[str, list[Any]] = {
        name: [sample[name] for sample in samples] for name in samples[0]
    }
    columns |= {
        **{name: [None] * len(samples) for name in _OF_A_SAMPLER},
        "loss_mask": [[1] * len(sample["response_ids"]) for sample in samples],
        "finish_reason": ["given"] * len(samples),
    }
    return pa.Table.from_pydict(columns, schema=schemas.ROLLOUTS)
