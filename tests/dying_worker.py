"""A score worker that dies: after it has written a shard, and before it says so."""

import os
from collections.abc import Iterator
from pathlib import Path

from artifacts.store import Store
from stages.score.order import Finished, InHand, ShardOrder
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
