"""Workers that die once: one when it has written a shard, before it says so; one at a batch."""

import os
from collections.abc import Iterator
from pathlib import Path

from artifacts.store import Store
from stages.score.order import Finished, InHand, Rated, ShardOrder
from stages.score.reward_model_worker import RewardModelWorker
from stages.score.worker import ScoreWorker


class DyingScoreWorker(ScoreWorker):
    """Ends its process the first time that it has written shard 1."""

    def score(
        self, store: Store, source: str, folder: str, order: ShardOrder
    ) -> Iterator[InHand | Finished]:
        for event in super().score(store, source, folder, order):
            mark = Path(store.root, "has-died")
            if order.index == 1 and isinstance(event, Finished) and not mark.exists():
                mark.touch()
                os._exit(1)
            yield event


class DyingRewardModelWorker(RewardModelWorker):
    """Ends its process the first time that it has loaded its model for shard 1."""

    def score(self, store: Store, source: str, order: ShardOrder) -> Iterator[InHand | Rated]:
        mark = Path(store.root, "has-died")
        if order.index == 1 and not mark.exists():
            mark.touch()
            os._exit(1)
        yield from super().score(store, source, order)
