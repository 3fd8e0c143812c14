"""What an advantage estimator gets and gives. All numbers are float64.

Shapes: S samples of the iteration; T response tokens of one sample, another count for each. A
ragged column is a sequence of S arrays, (T,) each. A *sampled* token is one that the policy chose
(mask 1); what the environment wrote in between has mask 0, and is skipped over.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stages.groups import has_spread


@dataclass(frozen=True)
class Component:
    """One part of the reward: its weight in the sum, and (S,) unweighted values; NaN is null."""

    name: str
    weight: float
    values_S: np.ndarray


@dataclass(frozen=True)
class Batch:
    """All samples of an iteration, over every rank and optimizer step.

    Attributes:
        groups: group id of each sample. Members of a group need not be neighbours.
        rewards_S: all of a sample's reward: components, token rewards, penalties. NaN where it is
            null, or where its sample was dropped: no statistic may see it.
        components: the parts that make up ``rewards_S``, weight x value, but for a KL penalty.
        token_rewards: ``rewards_S`` shared out over sampled tokens, ragged: what is known for a
            whole sample lies on its last sampled token. 0 where the mask is 0, and for nulls.
        masks: 1 for sampled tokens, else 0, ragged.
        values: the critic's value of the state before each token, ragged; None without a critic.
        sampler_logprobs: log-prob of each token in the distribution sampled from, ragged; None
            where responses were given.
        reference_logprobs: under the reference model, ragged; None without one.
        was_truncated_S: whether the response was cut at its limit.
        gamma, gae_lambda: discount, and GAE's lambda.
    """

    groups: Sequence[str]
    rewards_S: np.ndarray
    components: Sequence[Component]
    token_rewards: Sequence[np.ndarray]
    masks: Sequence[np.ndarray]
    values: Sequence[np.ndarray] | None
    sampler_logprobs: Sequence[np.ndarray] | None
    reference_logprobs: Sequence[np.ndarray] | None
    was_truncated_S: np.ndarray
    gamma: float = 1.0
    gae_lambda: float = 1.0

    @property
    def is_known(self) -> np.ndarray:
        """(S,) whether the sample has a reward."""
        return ~np.isnan(self.rewards_S)

    def sampled_lengths(self) -> np.ndarray:
        """(S,) how many tokens the policy chose."""
        return np.array([np.count_nonzero(mask) for mask in self.masks], dtype=np.float64)

    def per_sample(self, advantages_S: np.ndarray) -> "Estimate":
        """The estimate that gives each sampled token its sample's advantage; NaN gives 0."""
        filled_S = np.nan_to_num(np.asarray(advantages_S, dtype=np.float64), nan=0.0)
        return Estimate([a * (mask != 0) for a, mask in zip(filled_S, self.masks, strict=True)])


@dataclass(frozen=True)
class Estimate:
    """Advantages, ragged; with a critic also its targets. Where the mask is 0 neither counts."""

    advantages: Sequence[np.ndarray]
    returns: Sequence[np.ndarray] | None = None


def whitened(values: np.ndarray) -> np.ndarray:
    """(values - mean) / deviation, with the population (n) deviation and nothing added to it.

    Values without spread give 0.
    """
    if not has_spread(values):
        return np.zeros(values.shape)
    result: np.ndarray = (values - values.mean()) / values.std()
    return result


def discounted_sums(terms: np.ndarray, factor: float) -> np.ndarray:
    """x with x[t] = terms[t] + factor x[t + 1], and 0 past the end; (n,).

    By doubling: after k rounds, x[t] holds the first 2**k terms of its sum.
    """
    sums, reach, power = np.array(terms, dtype=np.float64), 1, float(factor)
    while reach < len(sums) and power != 0:
        sums[:-reach] += power * sums[reach:]
        reach, power = 2 * reach, power * power
    return sums
