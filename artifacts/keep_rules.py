"""Which policies a collection keeps: rules over version numbers and committed metrics.

    last=N             the newest N
    every=K            every K-th: K, 2K, 3K …
    best=METRIC[:N]    the N iterations (1 where none is given) whose metric is highest
    version=V          policy V
    all                every one, and of those out of reach what is left

All others choose among the policies that are still within reach, so that a collection made twice
removes nothing the second time.

Policy v is what the update of iteration v made. A metric is that of the same iteration, so
``best=reward/mean`` goes by the samples that the policy was trained on, which the one before drew.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# The versions within reach, each with the metrics of its iteration.
Versions = Mapping[int, Mapping[str, float | None]]


class RuleError(ValueError):
    """A rule that says nothing, or asks for what there is not; in a sentence."""


@dataclass(frozen=True)
class Rule:
    """A rule as it was written, and what it chooses of the versions there are."""

    text: str
    choose: Callable[[Versions], set[int]]


KEEP_ALL = Rule("all", lambda versions: set(versions))


def parse_rule(text: str) -> Rule:
    """The rule that ``text`` says. Raises RuleError."""
    name, _, value = text.partition("=")
    if text == "all":
        return KEEP_ALL
    if name == "best" and value:
        metric, _, count = value.rpartition(":")
        if not metric:
            metric, count = value, "1"
        number = _positive(text, count)
        return Rule(text, lambda versions: _best(versions, metric, number))
    if name not in ("last", "every", "version"):
        raise RuleError(
            f"{text!r} is no rule: say last=N, every=K, best=METRIC[:N], version=V or all"
        )
    number = _positive(text, value)
    if name == "last":
        return Rule(text, lambda versions: set(sorted(versions)[-number:]))
    if name == "every":
        return Rule(text, lambda versions: {v for v in versions if v % number == 0})
    return Rule(text, lambda versions: _one(versions, number))


def _positive(text: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise RuleError(f"{text!r} has {value!r} where a number from 1 on is due")
    return int(value)


def _one(versions: Versions, version: int) -> set[int]:
    if version not in versions:
        there = ", ".join(map(str, sorted(versions))) or "none"
        raise RuleError(f"version={version}: no such policy is within reach; there are {there}")
    return {version}


def _best(versions: Versions, metric: str, count: int) -> set[int]:
    known = sorted({name for metrics in versions.values() for name in metrics})
    if metric not in known:
        raise RuleError(f"best={metric}: no such metric; there are {', '.join(known) or 'none'}")
    values = {version: metrics.get(metric) for version, metrics in versions.items()}
    ranked = [(v, version) for version, v in values.items() if v is not None and not math.isnan(v)]
    # Of equals, the later one has seen more.
    return {version for _, version in sorted(ranked)[-count:]}
