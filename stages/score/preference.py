"""The verdict on responses that the data holds in pairs: it is known, and no reward is called."""

from typing import Any

from stages.score.components import Scored

COLUMN = "preference"
# What stands in the place of rewards in the identity of scores.
IDENTITY: dict[str, Any] = {"column": COLUMN, "weight": 1.0, "per_token": False}


def preferred(sample_index: int) -> Scored:
    """1 for sample 0 of a group, the chosen response, and 0 for the other."""
    verdict = float(sample_index == 0)
    return Scored({COLUMN: verdict}, verdict, token_rewards=None, error=None)
