"""Groups of samples and their rewards: which ones differ, and so have something to teach.

What a round of sampling counts and what an update trains on is decided here, by one rule. Pure
functions of arrays, float64. S samples; a null reward is NaN.
"""

from collections.abc import Sequence

import numpy as np

# What a null reward does: to its sample, to its group; ``fail`` lets none come this far.
NULL_POLICIES = ("drop_sample", "drop_group", "fail")

# Relative. What is one number on paper, summed in two orders, differs by about 1e-16; rewards
# that were float32 on their way differ by 1e-7 or more where they differ.
_ROUNDING = 1e-12
# Below it, squares come near to what float64 can't hold.
_TINY = 1e-150


def group_indices(groups: Sequence[str]) -> list[np.ndarray]:
    """Indices of each group's members, by the carried group id and never by stride."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return [np.array(indices) for indices in members.values()]


def has_spread(values: np.ndarray) -> bool:
    """Whether ``values`` differ by more than rounding. Without, a deviation is noise or 0."""
    if values.size == 0:
        return False
    return bool(values.max() - values.min() > max(_ROUNDING * np.abs(values).max(), _TINY))


def kept_by_null_policy(groups: Sequence[str], rewards_S: np.ndarray, on_null: str) -> np.ndarray:
    """Whether each sample stays, (S,): one with a null reward does not.

    With ``on_null == "drop_group"`` its whole group goes with it.
    """
    kept_S = ~np.isnan(rewards_S)
    if on_null == "drop_group":
        for indices in group_indices(groups):
            kept_S[indices] = kept_S[indices].all()
    return kept_S


def groups_with_spread(groups: Sequence[str], rewards_S: np.ndarray) -> list[np.ndarray]:
    """Members of each group whose known rewards differ, in the order of the groups."""
    return [indices for indices in group_indices(groups) if has_spread(_known(indices, rewards_S))]


def zero_spread_groups(groups: Sequence[str], rewards_S: np.ndarray) -> list[np.ndarray]:
    """Members of each group whose known rewards, at least one, are all equal."""
    return [
        indices
        for indices in group_indices(groups)
        if len(known := _known(indices, rewards_S)) and not has_spread(known)
    ]


def count_with_spread(groups: Sequence[str], rewards_S: np.ndarray) -> dict[str, int]:
    """How many groups have rewards that differ, under each policy for nulls."""
    counts = {}
    for on_null in NULL_POLICIES:
        kept_S = kept_by_null_policy(groups, rewards_S, on_null)
        counts[on_null] = len(groups_with_spread(groups, np.where(kept_S, rewards_S, np.nan)))
    return counts


def _known(indices: np.ndarray, rewards_S: np.ndarray) -> np.ndarray:
    values: np.ndarray = rewards_S[indices]
    return values[~np.isnan(values)]
