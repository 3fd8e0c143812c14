"""Advantage estimators as their papers write them: plain loops over lists, nothing shared.

Each takes samples (:class:`Sample`) and gives a list of floats a sample, one a token; 0 where the
policy did not choose the token, and for a sample without a reward.
"""

import math
from dataclasses import dataclass


@dataclass
class Sample:
    group: str
    reward: float | None  # all of it, as one number
    parts: list[tuple[float, float | None]]  # (weight, value) of each component
    rewards: list[float]  # all of it, token by token
    mask: list[int]
    values: list[float]


def mean(numbers):
    return math.fsum(numbers) / len(numbers)


def deviation(numbers, freedom):
    center = mean(numbers)
    return math.sqrt(math.fsum((x - center) ** 2 for x in numbers) / (len(numbers) - freedom))


def all_one(numbers):
    """Whether they are one number on paper."""
    return max(numbers) - min(numbers) <= max(1e-12 * max(map(abs, numbers)), 1e-150)


def siblings(samples, sample):
    return [s for s in samples if s.group == sample.group and s.reward is not None]


def spread_over(samples, numbers):
    return [[a * m for m in s.mask] for s, a in zip(samples, numbers, strict=True)]


def by_group(samples, rule):
    numbers = []
    for sample in samples:
        members = siblings(samples, sample)
        rewards = [s.reward for s in members]
        if sample.reward is None or len(members) < 2 or all_one(rewards):
            numbers.append(0.0)
        else:
            numbers.append(rule(sample, members, rewards))
    return spread_over(samples, numbers)


def grpo(samples, gamma, lam):
    return by_group(samples, lambda s, _, rs: (s.reward - mean(rs)) / deviation(rs, 1))


def dr_grpo(samples, gamma, lam):
    return by_group(samples, lambda s, _, rs: s.reward - mean(rs))


def rloo(samples, gamma, lam):
    return by_group(samples, lambda s, ms, _: s.reward - mean([m.reward for m in ms if m is not s]))


def maxrl(samples, gamma, lam):
    return by_group(samples, lambda s, _, rs: (s.reward - mean(rs)) / mean(rs))


def opo(samples, gamma, lam):
    def rule(sample, members, _):
        total = sum(sum(m.mask) for m in members)
        baseline = math.fsum(sum(m.mask) * m.reward for m in members) / max(total, 1)
        return sample.reward - baseline

    return by_group(samples, rule)


def gdpo(samples, gamma, lam):
    sums = []
    for sample in samples:
        members = siblings(samples, sample)
        total = 0.0
        for k, (weight, value) in enumerate(sample.parts):
            values = [m.parts[k][1] for m in members]
            if sample.reward is not None and not all_one(values):
                total += weight * (value - mean(values)) / deviation(values, 1)
        sums.append(total)
    known = [x for x, s in zip(sums, samples, strict=True) if s.reward is not None]
    if not known or max(map(abs, known)) == 0:
        return spread_over(samples, [0.0] * len(samples))
    scale = deviation(known, 0)
    numbers = [(x - mean(known)) / scale for x in sums]
    return spread_over(
        samples, [0.0 if s.reward is None else x for x, s in zip(numbers, samples, strict=True)]
    )


def reinforce(samples, gamma, lam):
    result = []
    for sample in samples:
        places = [t for t, m in enumerate(sample.mask) if m]
        row = [0.0] * len(sample.mask)
        for n, t in enumerate(places):
            row[t] = math.fsum(gamma**k * sample.rewards[u] for k, u in enumerate(places[n:]))
        result.append(row)
    return result


def whiten(samples, rows):
    tokens = [
        x
        for sample, row in zip(samples, rows, strict=True)
        for x, m in zip(row, sample.mask, strict=True)
        if m and sample.reward is not None
    ]
    if not tokens or all_one(tokens):
        return [[0.0] * len(row) for row in rows]
    center, scale = mean(tokens), deviation(tokens, 0)
    return [
        [
            (x - center) / scale if m and s.reward is not None else 0.0
            for x, m in zip(row, s.mask, strict=True)
        ]
        for s, row in zip(samples, rows, strict=True)
    ]


def reinforce_pp(samples, gamma, lam):
    return whiten(samples, reinforce(samples, gamma, lam))


def reinforce_pp_baseline(samples, gamma, lam):
    return whiten(samples, dr_grpo(samples, gamma, lam))


def gae_unwhitened(samples, gamma, lam):
    """The double sum of the paper: (gamma lambda)^l delta_{t+l}, no recursion."""
    result = []
    for sample in samples:
        places = [t for t, m in enumerate(sample.mask) if m]
        following = [sample.values[t] for t in places[1:]] + [0.0]
        deltas = [
            sample.rewards[t] + gamma * after - sample.values[t]
            for t, after in zip(places, following, strict=False)
        ]
        row = [0.0] * len(sample.mask)
        for n, t in enumerate(places):
            row[t] = math.fsum((gamma * lam) ** k * d for k, d in enumerate(deltas[n:]))
        result.append(row)
    return result


def gae(samples, gamma, lam):
    return whiten(samples, gae_unwhitened(samples, gamma, lam))


ORACLES = {
    f.__name__: f
    for f in (
        grpo,
        dr_grpo,
        rloo,
        maxrl,
        opo,
        gdpo,
        reinforce,
        reinforce_pp,
        reinforce_pp_baseline,
        gae,
    )
}
