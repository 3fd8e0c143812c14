"""A reward in this very process, so that a breakpoint in it works; no timeout can end it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stages.score.calls import Pace, call_reward
from stages.score.config import RewardSpec
from stages.score.outcomes import Outcome
from stages.score.rewards import load_reward


class RewardHere:
    """Like ``RewardProcess``."""

    def __init__(self, spec: RewardSpec) -> None:
        self._reward = load_reward(spec)
        self._pace = Pace(spec.calls_per_second)

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Outcome | None]]:
        """Events as in ``RewardProcess.score``, all of them when the last call has ended."""
        events: list[tuple[int, Outcome | None]] = []

        def report(index: int, outcome: Outcome | None) -> None:
            events.append((index, outcome))

        call_reward(self._reward, rows, report, self._pace)
        return iter(events)

    def close(self) -> None:
        """Nothing to end."""
