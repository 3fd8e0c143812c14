"""Reward functions: found by name, held against what their configuration says of them.

    def per_sample(text: str, ground_truth: str | None, **row) -> float | None
    def per_batch(batch: list[Record]) -> list[float | None]          # batched: true
    def per_token(text: str, tokens: list[str], **row) -> list[float]  # per_token: true

``row`` holds ``prompt``, ``finish_reason``, ``source``, ``num_tokens``, ``sample_id``,
``group_id`` and the data row's other columns; a :class:`Record` is a mapping of all of them. Any
of the three may be ``async``. None abstains: the sample has no reward, which is not one of 0.
"""

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from artifacts.keys import key_of, source_digest
from stages.score.builtin import BUILTINS
from stages.score.checkpoint import check_checkpoint, checkpoint_digest
from stages.score.config import AnyReward, RewardSpec
from stages.score.judge_spec import JudgeSpec, rubric_of
from stages.score.reward_model_spec import RewardModelSpec
from stages.user_code import load_function

Record = Mapping[str, Any]

# What a reward is called with beside the data row's columns and its options.
ARGUMENTS = (
    "text",
    "ground_truth",
    "prompt",
    "finish_reason",
    "source",
    "num_tokens",
    "sample_id",
    "group_id",
    "tokens",
)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Reward:
    """A function, and what its configuration says of it."""

    spec: RewardSpec
    function: Callable[..., Any]
    is_async: bool


def load_reward(spec: RewardSpec) -> Reward:
    """The reward that ``spec`` names, its options checked.

    Raises:
        ValueError: there is none, or it can't be called as ``spec`` says.
    """
    function = load_function(BUILTINS.get(spec.fn, spec.fn), "reward")
    reward = Reward(spec, function, inspect.iscoroutinefunction(function))
    _check_options(reward)
    _check_shape(reward)
    if spec.fn in BUILTINS:
        module = importlib.import_module(function.__module__)
        check = getattr(module, f"check_{function.__name__}", None)
        if check is not None:
            check(**spec.options)
    return reward


def reward_digests(specs: Sequence[AnyReward]) -> dict[str, str]:
    """Column name to digest of what lies outside the configuration: how that enters a key.

    Of a function its source, of a reward model its folder's files, of a judge its rubric.

    Raises:
        ValueError, TypeError: a reward can't work as its configuration says.
    """
    return {spec.column: _digest(spec) for spec in specs}


def _digest(spec: AnyReward) -> str:
    if isinstance(spec, JudgeSpec):
        return key_of({"rubric": rubric_of(spec)})
    if isinstance(spec, RewardModelSpec):
        check_checkpoint(spec)
        return checkpoint_digest(spec)
    return source_digest(load_reward(spec).function)


def reward_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a reward is called with, of a rollout row and its ``num_tokens``."""
    return {
        **json.loads(row["extra"] or "{}"),
        "text": row["text"],
        "ground_truth": row["ground_truth"],
        "prompt": row["prompt_text"],
        "finish_reason": row["finish_reason"],
        "source": row["source"],
        "num_tokens": row["num_tokens"],
        "sample_id": row["sample_id"],
        "group_id": row["group_id"],
    }


def _check_options(reward: Reward) -> None:
    """Refuse an option that no parameter takes by its own name: ``**row`` would swallow it."""
    parameters = inspect.signature(reward.function).parameters.values()
    taken = [p.name for p in parameters if p.kind in _NAMED and p.name not in ARGUMENTS]
    taken = [name for name in taken if not (reward.spec.batched and name == _first(reward))]
    for name in reward.spec.options:
        if name not in taken:
            raise ValueError(
                f"reward {reward.spec.column!r} has no option {name!r}; "
                f"it has {', '.join(taken) or 'none'}"
            )


def _check_shape(reward: Reward) -> None:
    spec, column = reward.spec, reward.spec.column
    first, parameters = _first(reward), inspect.signature(reward.function).parameters
    if spec.batched and not _takes_a_batch(reward):
        raise ValueError(
            f"reward {column!r} is batched, and its function is not called with a batch alone: "
            "write def fn(batch) -> list, its options as keyword parameters"
        )
    if not spec.batched and first == "batch":
        raise ValueError(f"reward {column!r} takes a batch: set batched: true")
    if spec.per_token != ("tokens" in parameters) and spec.fn in BUILTINS:
        said = "true" if "tokens" in parameters else "false"
        raise ValueError(f"reward {column!r} ({spec.fn}) works with per_token: {said}")
    if not reward.is_async and (spec.concurrency > 1 or spec.calls_per_second):
        raise ValueError(
            f"reward {column!r} has concurrency or calls_per_second, and its function is not "
            "async: write async def, or take more resources.score.workers"
        )


def _takes_a_batch(reward: Reward) -> bool:
    try:
        inspect.signature(reward.function).bind([], **reward.spec.options)
    except TypeError:
        return False
    return _first(reward) not in ARGUMENTS


def _first(reward: Reward) -> str:
    return next(iter(inspect.signature(reward.function).parameters), "")
