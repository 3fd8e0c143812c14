"""Rewards to advantages. Pure functions of arrays, in float64; S is the number of samples.

A null reward is NaN here: its sample has weight 0 and moves no baseline.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

Advantages = Callable[[Sequence[str], np.ndarray], np.ndarray]


def group_indices(groups: Sequence[str]) -> list[np.ndarray]:
    """Indices of each group's members, by the carried group id and never by stride."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    return [np.array(indices) for indices in members.values()]


def grpo(groups: Sequence[str], rewards_S: np.ndarray) -> np.ndarray:
    """(reward - group mean) / group deviation, (S,).

    The deviation is the sample one (n - 1), with nothing added to it. A group without spread,
    or with fewer than two known rewards, gets 0. DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    advantages_S = np.zeros(len(rewards_S))
    for indices in group_indices(groups):
        known = indices[~np.isnan(rewards_S[indices])]
        if len(known) < 2:
            continue
        rewards = rewards_S[known]
        # By equality: the deviation of equal numbers need not round to 0.
        if rewards.min() == rewards.max():
            continue
        advantages_S[known] = (rewards - rewards.mean()) / rewards.std(ddof=1)
    return advantages_S


ADVANTAGES: dict[str, Advantages] = {"grpo": grpo}


def sample_weights(groups: Sequence[str], rewards_S: np.ndarray, on_null: str) -> np.ndarray:
    """1 for a sample that enters the step's counts, else 0; (S,).

    A null reward leaves out its sample, or with ``on_null == "drop_group"`` its whole group.
    """
    weights_S = (~np.isnan(rewards_S)).astype(np.float64)
    if on_null == "drop_group":
        for indices in group_indices(groups):
            weights_S[indices] = weights_S[indices].min()
    return weights_S
