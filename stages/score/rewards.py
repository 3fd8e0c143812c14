"""Reward functions: found by import path, called a sample at a time, their failures kept as data.

A reward is ``def name(text, ground_truth, **row) -> float | None``. ``text`` is the response,
``row`` holds ``prompt``, ``finish_reason``, ``num_tokens``, ``sample_id`` and the data row's other
columns. None abstains: the sample has no reward, which is not a reward of 0.
"""

import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts.keys import source_digest
from stages.score.config import RewardSpec
from stages.user_code import load_function

Reward = Callable[..., float | None]


def load_reward(path: str) -> Reward:
    """The function at ``module:name`` or ``file.py:name``. Raises ValueError: there is none."""
    return load_function(path, "reward")


def reward_digests(specs: Sequence[RewardSpec]) -> dict[str, str]:
    """Column name to source digest: how user code enters a key."""
    return {spec.column: source_digest(load_reward(spec.fn)) for spec in specs}


@dataclass(frozen=True)
class Scored:
    """A sample's components by column, their weighted sum, and what failed (JSON)."""

    components: dict[str, float | None]
    reward: float | None
    error: str | None


def score_sample(rewards: Sequence[tuple[RewardSpec, Reward]], row: Mapping[str, Any]) -> Scored:
    """Call each reward on a rollout row. The sum is null when a component is."""
    arguments = reward_arguments(row)
    components: dict[str, float | None] = {}
    errors = []
    for spec, function in rewards:
        try:
            components[spec.column] = checked(function(**arguments))
        except Exception as error:
            components[spec.column] = None
            errors.append(error_record(spec, row["sample_id"], error))
    return Scored(
        components, weighted_sum(rewards, components), json.dumps(errors) if errors else None
    )


def reward_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a reward function is called with."""
    return {
        **json.loads(row["extra"] or "{}"),
        "text": row["text"],
        "ground_truth": row["ground_truth"],
        "prompt": row["prompt_text"],
        "finish_reason": row["finish_reason"],
        "num_tokens": len(row["response_ids"]),
        "sample_id": row["sample_id"],
    }


def checked(value: Any) -> float | None:
    """``value`` as a finite float, or None.

    Raises:
        TypeError: it is no number.
        ValueError: it is NaN or infinite.
    """
    if value is None:
        return None
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"a reward is a number or None, and this is {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a reward is finite, and this is {number}")
    return number


def weighted_sum(
    rewards: Sequence[tuple[RewardSpec, Reward]], components: Mapping[str, float | None]
) -> float | None:
    """Sum of weight x component; None when one is None."""
    total = 0.0
    for spec, _ in rewards:
        value = components[spec.column]
        if value is None:
            return None
        total += spec.weight * value
    return total


def error_record(spec: RewardSpec, sample_id: str, error: Exception) -> dict[str, Any]:
    """What failed, without addresses or host paths: it is part of a digested shard."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return {
        "function": spec.column,
        "sample_id": sample_id,
        "type": type(error).__name__,
        "message": str(error),
        "traceback": [f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in frames],
    }
