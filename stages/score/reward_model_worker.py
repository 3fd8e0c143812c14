"""The reward model's actor: reads a rollout shard, gives each of its samples an outcome."""

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from artifacts.shards import read_shard
from artifacts.store import Store
from stages.contract import StageError
from stages.score.checkpoint import check_digest
from stages.score.order import InHand, Rated, ShardOrder, places_to_score, read_earlier
from stages.score.outcomes import Outcome
from stages.score.reward_model_spec import RewardModelJob

if TYPE_CHECKING:
    from stages.score.reward_model import RewardModel

_COLUMNS = ("sample_id", "prompt_text", "messages", "text")


class RewardModelWorker:
    """One reward model, loaded when it is first asked."""

    def __init__(self, name: str, job: RewardModelJob) -> None:
        self._name, self._job, self._spec = name, job, job.spec
        self._model: RewardModel | None = None

    def score(self, store: Store, source: str, order: ShardOrder) -> Iterator[InHand | Rated]:
        """Outcomes of a rollout shard of folder ``source``.

        Raises:
            StageError: the model can't be loaded, or fails on a batch, which the message names.
        """
        model, start = self._loaded(), time.time()
        rollouts = read_shard(store, source, order.rollout, _COLUMNS)
        rows = rollouts.take(places_to_score(rollouts, read_earlier(store, order))).to_pylist()
        encoded = [model.encoded(row) for row in rows]
        outcomes = [each if isinstance(each, Outcome) else Outcome() for each in encoded]
        tokens = {n: each for n, each in enumerate(encoded) if not isinstance(each, Outcome)}
        for batch in model.batches(tokens):
            described = (
                f"{rows[batch[0]]['sample_id']} and {len(batch) - 1} more (reward "
                f"{self._spec.column}, up to {len(tokens[batch[0]])} tokens each)"
            )
            if order.attempt > 1:
                yield InHand(order.index, described)
            try:
                values = model.values([tokens[n] for n in batch])
            except (IndexError, RuntimeError, ValueError) as error:
                raise StageError(
                    f"reward model {self._name} failed on {model.device}, shard {order.index}, "
                    f"sample {described}: {error}"
                ) from error
            for n, value in zip(batch, values, strict=True):
                outcomes[n] = value
        num_tokens = sum(map(len, tokens.values()))
        yield Rated(order.index, outcomes, self._entry(order, start, len(rows), num_tokens))

    def _entry(
        self, order: ShardOrder, start: float, num_rows: int, num_tokens: int
    ) -> dict[str, Any]:
        return {
            "unit": f"shard-{order.index:05d}.{self._spec.column}",
            "worker": f"{self._name}:{os.getpid()}",
            "attempt": order.attempt,
            "start": start,
            "seconds": time.time() - start,
            "rows": num_rows,
            "tokens": num_tokens,
            "bytes": 0,
        }

    def _loaded(self) -> "RewardModel":
        from stages.score.reward_model import RewardModel

        # Here and not in the constructor: what goes wrong here is told as it is, and is no death.
        if self._model is None:
            try:
                check_digest(self._job)
                self._model = RewardModel(self._spec)
            except (OSError, RuntimeError, ValueError) as error:
                raise StageError(
                    f"reward {self._spec.column!r}: model {self._spec.model!r} can't be loaded: "
                    f"{error}"
                ) from error
        return self._model
