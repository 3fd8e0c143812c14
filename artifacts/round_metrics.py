"""A stage's metrics over the rounds of an iteration, from those that each round committed."""

import math
from collections.abc import Sequence

from artifacts.manifests import Manifest

_COUNTS = ("samples", "_tokens", "_groups", "cost")


def over_rounds(rounds: Sequence[Manifest]) -> dict[str, float | None]:
    """Sums of counts, extremes of extremes, means of means weighted by what they are means of.

    A reward's deviation is that of all rounds' samples together. What no round knows is None.
    """
    if len(rounds) == 1:
        return dict(rounds[0].metrics)
    names = dict.fromkeys(name for made in rounds for name in made.metrics)
    return {name: _combined(name, rounds) for name in names}


def _combined(name: str, rounds: Sequence[Manifest]) -> float | None:
    known = [made for made in rounds if made.metrics.get(name) is not None]
    if not known:
        return None
    values = _values(name, known)
    last = name.rpartition("/")[2]
    if not _is_component(name, known[0]):
        if last.endswith(_COUNTS):
            return math.fsum(values)
        if last in ("max", "min") or last.endswith(("_max", "_min")):
            return max(values) if last.endswith("max") else min(values)
        if last == "std" or last.endswith("_std"):
            return _deviation(name, known)
    return _mean(values, [_weight(name, made) for made in known])


def _is_component(name: str, made: Manifest) -> bool:
    """Whether it is the mean of a reward component, whatever the user called that."""
    return name in {f"reward/{spec['column']}" for spec in made.identity.get("rewards", [])}


def _deviation(name: str, rounds: Sequence[Manifest]) -> float:
    """Of all samples together: sqrt(E[deviation² + (mean - E[mean])²])."""
    mean = "reward/mean" if name == "reward/std" else name.removesuffix("_std")
    weights = [_weight(name, made) for made in rounds]
    means = _values(mean, rounds)
    centre = _mean(means, weights)
    pairs = zip(_values(name, rounds), means, strict=True)
    return math.sqrt(_mean([std**2 + (m - centre) ** 2 for std, m in pairs], weights))


def _weight(name: str, made: Manifest) -> float:
    """How much a round's value counts in a mean: by its tokens, samples, or rewarded samples."""
    metrics = made.metrics
    if name == "rollout/sampled_logprob_mean":
        return float(metrics["rollout/response_tokens"] or 0)
    if name.startswith("reward/") and not name.endswith("_share"):
        own = f"{name.removesuffix('_std')}_null_share"
        return made.rows * (1 - (metrics.get(own, metrics.get("score/null_share")) or 0.0))
    return float(made.rows)


def _values(name: str, rounds: Sequence[Manifest]) -> list[float]:
    return [float(made.metrics[name] or 0.0) for made in rounds]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    total = math.fsum(weights)
    if total == 0:
        return math.fsum(values) / len(values)
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total
