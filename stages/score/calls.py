"""Calling a reward on samples: one at a time, all at once, or several awaited together.

Runs wherever the function does: in a process of its own (``reward_child.py``) or, to debug, in
the worker's. Answer *i* belongs to sample *i* whatever ends first: outcomes carry indices.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stages.contract import StageError
from stages.score.outcomes import (
    Outcome,
    as_list,
    checked_tokens,
    checked_value,
    failed,
    timed_out,
)
from stages.score.rewards import Reward

Row = Mapping[str, Any]
# Called with a sample's index: with None when its call begins, with the outcome when it ended.
Report = Callable[[int, Outcome | None], None]


class Pace:
    """Lets a call begin every 1 / ``per_second`` seconds. The first begins at once."""

    def __init__(self, per_second: float | None) -> None:
        self._gap = 1 / per_second if per_second else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        """Wait for the next call's turn."""
        now = time.monotonic()
        mine = max(now, self._next)
        self._next = mine + self._gap
        if mine > now:
            await asyncio.sleep(mine - now)


def call_reward(reward: Reward, rows: Sequence[Row], report: Report, pace: Pace) -> None:
    """Call ``reward`` on ``rows`` (see ``rewards.reward_arguments``) and report each outcome.

    Args:
        pace: of async calls, kept from one shard to the next.

    Raises:
        StageError: a batched function gave no list of the right length. What it gave belongs to
            no sample for certain, and it would do so again.
    """
    if reward.spec.batched:
        _call_batch(reward, rows, report)
    elif reward.is_async:
        asyncio.run(_await_all(reward, rows, report, pace))
    else:
        _call_each(reward, rows, report)


def _call_each(reward: Reward, rows: Sequence[Row], report: Report) -> None:
    function, keywords = reward.function, _keywords(reward)
    for index, row in enumerate(rows):
        report(index, None)
        try:
            value = function(**keywords(row))
        except (Exception, SystemExit) as error:
            report(index, failed(error))
        else:
            report(index, _checked(reward, value, row))


def _call_batch(reward: Reward, rows: Sequence[Row], report: Report) -> None:
    for index in range(len(rows)):
        report(index, None)
    try:
        batch = [dict(row) for row in rows]
        values = reward.function(batch, **reward.spec.options)
        if reward.is_async:
            values = asyncio.run(_with_timeout(values, reward.spec.timeout_seconds))
    except (Exception, SystemExit) as error:
        for index in range(len(rows)):
            report(index, _failed_call(error, reward))
        return
    try:
        values = as_list(values, len(rows), "samples")
    except (TypeError, ValueError) as error:
        raise StageError(f"reward {reward.spec.column!r}: {error}") from None
    for index, (value, row) in enumerate(zip(values, rows, strict=True)):
        report(index, _checked(reward, value, row))


async def _await_all(reward: Reward, rows: Sequence[Row], report: Report, pace: Pace) -> None:
    slots = asyncio.Semaphore(reward.spec.concurrency)
    keywords = _keywords(reward)

    async def call(index: int, row: Row) -> None:
        async with slots:
            await pace.turn()
            report(index, None)
            try:
                started = reward.function(**keywords(row))
                value = await _with_timeout(started, reward.spec.timeout_seconds)
            except (Exception, SystemExit) as error:
                report(index, _failed_call(error, reward))
            else:
                report(index, _checked(reward, value, row))

    await asyncio.gather(*(call(index, row) for index, row in enumerate(rows)))


class CallTimeoutError(Exception):
    """Our own clock ran out, and not one inside the function."""


async def _with_timeout(awaitable: Any, seconds: float | None) -> Any:
    try:
        async with asyncio.timeout(seconds) as limit:
            return await awaitable
    except TimeoutError:
        if limit.expired():
            raise CallTimeoutError from None
        raise


def _failed_call(error: BaseException, reward: Reward) -> Outcome:
    seconds = reward.spec.timeout_seconds
    if isinstance(error, CallTimeoutError) and seconds is not None:
        return timed_out(seconds)
    return failed(error)


def _checked(reward: Reward, value: Any, row: Row) -> Outcome:
    if reward.spec.per_token:
        return checked_tokens(value, row["num_tokens"])
    return checked_value(value)


def _keywords(reward: Reward) -> Callable[[Row], dict[str, Any]]:
    """From a row to what the function is called with: options last, as they are meant."""
    parameters = inspect.signature(reward.function).parameters
    options = reward.spec.options
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return lambda row: {**row, **options}
    names = [name for name in parameters if name not in options]
    return lambda row: {**{name: row[name] for name in names if name in row}, **options}
