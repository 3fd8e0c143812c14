"""The rollout actor: samples whole shards with its engine and writes them to the store itself."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from artifacts import schemas
from artifacts.manifests import Shard
from artifacts.shards import write_shard
from artifacts.store import Store
from stages.rollout.config import RolloutConfig
from stages.rollout.engine import Request, Sampled, make_engine


@dataclass(frozen=True)
class PolicyName:
    """Which weights: the number of updates behind them, and their digest."""

    version: int
    digest: str


@dataclass(frozen=True)
class ShardOrder:
    """A shard to make: its index, and a record for each sample, all columns but the sampled."""

    index: int
    samples: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Sample:
    """Progress: one sample was drawn."""

    tokens: int


@dataclass(frozen=True)
class Finished:
    """Progress: a shard lies in the store. ``entry`` is its ledger row."""

    index: int
    shard: Shard
    entry: Mapping[str, Any]


class RolloutWorker:
    """An engine and the name of the weights that it holds."""

    def __init__(
        self, name: str, model: str, policy: PolicyName, config: RolloutConfig, context: int
    ) -> None:
        self._name = name
        self._held = policy
        self._is_deterministic = config.deterministic
        self._engine = make_engine(model, config, context)

    def held(self) -> PolicyName:
        """The weights that the engine samples with."""
        return self._held

    def load(self, policy: PolicyName, weights: Mapping[str, Any]) -> float:
        """Take the weights of ``policy``. Returns seconds."""
        start = time.time()
        self._engine.load(weights)
        self._held = policy
        return time.time() - start

    def generate(
        self,
        store: Store,
        folder: str,
        policy: PolicyName,
        orders: Sequence[ShardOrder],
        sampling: RolloutConfig | None = None,
    ) -> Iterator[Sample | Finished]:
        """Sample ``orders`` together, and write each shard as soon as its last sample ends.

        ``sampling`` is for what is no part of the training: see :meth:`Engine.sample`.
        """
        if policy != self._held:
            raise RuntimeError(f"asked to sample with {policy}, and the engine holds {self._held}")
        # Most kernels add up in an order that depends on the batch: a shard that is to be the same
        # whatever else there is to make is a batch of its own.
        batches = [[order] for order in orders] if self._is_deterministic else [orders]
        for batch in batches:
            yield from self._generate(store, folder, batch, sampling)
        if sampling is not None:  # the training's samples are not to see that it was here
            self._engine.forget()

    def _generate(
        self,
        store: Store,
        folder: str,
        orders: Sequence[ShardOrder],
        sampling: RolloutConfig | None,
    ) -> Iterator[Sample | Finished]:
        start = time.time()
        if self._is_deterministic:
            self._engine.forget()
        places = [(order, k) for order in orders for k in range(len(order.samples))]
        done: dict[int, dict[int, Sampled]] = {order.index: {} for order in orders}
        requests = [_request(order.samples[k]) for order, k in places]
        for place, sampled in self._engine.sample(requests, sampling):
            order, k = places[place]
            done[order.index][k] = sampled
            yield Sample(len(sampled.response_ids))
            if len(done[order.index]) == len(order.samples):
                yield self._finish(store, folder, order, done.pop(order.index), start)

    def _finish(
        self, store: Store, folder: str, order: ShardOrder, drawn: dict[int, Sampled], start: float
    ) -> Finished:
        table = self._table(order, drawn)
        shard = write_shard(store, folder, order.index, table)
        entry = {
            "unit": f"shard-{order.index:05d}",
            "worker": f"{self._name}:{os.getpid()}",
            "start": start,
            "seconds": time.time() - start,
            "rows": shard.rows,
            "tokens": sum(len(sampled.response_ids) for sampled in drawn.values()),
            "bytes": shard.bytes,
        }
        return Finished(order.index, shard, entry)

    def _table(self, order: ShardOrder, drawn: dict[int, Sampled]) -> pa.Table:
        sampled = [drawn[k] for k in range(len(order.samples))]
        columns: dict[str, list[Any]] = {
            name: [sample[name] for sample in order.samples] for name in order.samples[0]
        }
        columns |= {
            "response_ids": [s.response_ids for s in sampled],
            "logprobs": [s.logprobs for s in sampled],
            "loss_mask": [[1] * len(s.response_ids) for s in sampled],
            "finish_reason": [s.finish_reason for s in sampled],
            "text": [s.text for s in sampled],
            "policy_version": [self._held.version] * len(sampled),
            "policy_digest": [self._held.digest] * len(sampled),
        }
        return pa.Table.from_pydict(columns, schema=schemas.ROLLOUTS)


def _request(sample: Mapping[str, Any]) -> Request:
    return Request(sample["prompt_ids"], sample["seed"])
