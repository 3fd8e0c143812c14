"""Rewards to advantages: every estimator, one function each. A new one is a function here.

Each takes a :class:`~stages.update.batch.Batch` and gives an
:class:`~stages.update.batch.Estimate`. A null reward is NaN: it moves no baseline and no
statistic, and its sample gets 0. Statistics over the batch are over all samples of the iteration:
every rank sees all of them, and computes the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stages.contract import StageError
from stages.groups import group_indices, has_spread
from stages.update.batch import Batch, Estimate, discounted_sums, whitened
from stages.user_code import is_import_path, load_function

Estimating = Callable[[Batch], Estimate]


@dataclass(frozen=True)
class Estimator:
    """A named estimator, and what it asks for.

    Attributes:
        compares_group: without two samples of a prompt it has nothing to say.
        needs_critic: it reads ``Batch.values``.
        normalizes_components: it gives each part of the reward a scale of its own.
        discounts: it reads ``Batch.gamma``.
    """

    estimate: Estimating
    compares_group: bool = False
    needs_critic: bool = False
    normalizes_components: bool = False
    discounts: bool = False


ESTIMATORS: dict[str, Estimator] = {}


def find_estimator(name: str) -> Estimator:
    """The estimator of that name, or the user's own at an import path.

    Raises:
        ValueError: there is no such function.
    """
    if is_import_path(name):
        return Estimator(load_function(name, "advantage"))
    return ESTIMATORS[name]


def _estimator(**properties: bool) -> Callable[[Estimating], Estimating]:
    def register(function: Estimating) -> Estimating:
        ESTIMATORS[function.__name__] = Estimator(function, **properties)
        return function

    return register


@_estimator(compares_group=True)
def grpo(batch: Batch) -> Estimate:
    """(r - group mean) / group deviation, the sample one (n - 1), with nothing added to it.

    DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    return batch.per_sample(_group_normalized(batch.groups, batch.rewards_S))


@_estimator(compares_group=True)
def dr_grpo(batch: Batch) -> Estimate:
    """r - group mean.

    Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2: GRPO done right.
    """
    return batch.per_sample(_by_group(batch.groups, batch.rewards_S, lambda r: r - r.mean()))


@_estimator(compares_group=True)
def rloo(batch: Batch) -> Estimate:
    """r - mean of the group's other rewards. Back to Basics, arXiv:2402.14740, equation 8."""
    return batch.per_sample(
        _by_group(batch.groups, batch.rewards_S, lambda r: (r - r.mean()) * (len(r) / (len(r) - 1)))
    )


@_estimator(compares_group=True)
def opo(batch: Batch) -> Estimate:
    """r - b, with b the group's mean reward weighted by the lengths of the responses.

    On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585, section 3: the baseline of least
    variance, where the gradient's squared norm is proportional to the length.
    """
    lengths_S = batch.sampled_lengths()
    advantages_S = np.zeros(len(batch.rewards_S))
    for known in _known_groups(batch.groups, batch.rewards_S):
        rewards, lengths = batch.rewards_S[known], lengths_S[known]
        if has_spread(rewards) and lengths.sum() > 0:
            advantages_S[known] = rewards - (lengths * rewards).sum() / lengths.sum()
    return batch.per_sample(advantages_S)


@_estimator(compares_group=True)
def maxrl(batch: Batch) -> Estimate:
    """(r - group mean) / group mean, for rewards that are not negative.

    Maximum Likelihood Reinforcement Learning, arXiv:2602.02710: with rewards 0 and 1, the mean of
    the scores of successes alone, less the baseline.

    Raises:
        StageError: a reward is negative, so that a mean is no rate of success.
    """
    lowest = min(batch.rewards_S[batch.is_known], default=0.0)
    if lowest < 0:
        raise StageError(
            f"maxrl divides by a group's mean reward, and there is a reward of {lowest:g}: "
            "give it rewards of 0 and more"
        )
    return batch.per_sample(
        _by_group(batch.groups, batch.rewards_S, lambda r: (r - r.mean()) / r.mean())
    )


@_estimator(compares_group=True, normalizes_components=True)
def gdpo(batch: Batch) -> Estimate:
    """Components normalized in groups as by grpo, summed by weight, over the batch's deviation.

    GDPO, arXiv:2601.05242, section 3. The last deviation is the population one, over samples.
    """
    known_S = batch.is_known
    sums_S = np.zeros(len(known_S))
    for component in batch.components:
        values_S = np.where(known_S, component.values_S, np.nan)
        sums_S += component.weight * np.nan_to_num(_group_normalized(batch.groups, values_S))
    # The batch's mean is that of groups whose sums are 0: taking off its rounding would give
    # groups without spread something to teach.
    deviation = sums_S[known_S].std() if known_S.any() else 0.0
    return batch.per_sample(sums_S / deviation if deviation > 0 else np.zeros(len(sums_S)))


@_estimator(discounts=True)
def reinforce(batch: Batch) -> Estimate:
    """The discounted return from each token on, with no baseline. Williams, 1992.

    The recursion runs over sampled tokens only. With gamma 1 and a reward for the whole sample
    alone, it is that reward at every token.
    """
    return Estimate(_returns(batch))


@_estimator(discounts=True)
def reinforce_pp(batch: Batch) -> Estimate:
    """Discounted returns, whitened over all sampled tokens of the batch.

    REINFORCE++, arXiv:2501.03262, section 3: the KL against the reference is in the reward
    (``update.reward_kl_coef``), token by token.
    """
    return Estimate(_whitened_tokens(batch, _returns(batch)))


@_estimator(compares_group=True)
def reinforce_pp_baseline(batch: Batch) -> Estimate:
    """r - group mean, whitened over all sampled tokens of the batch.

    REINFORCE++, arXiv:2501.03262, section 3, its variant with a group baseline.
    """
    return Estimate(_whitened_tokens(batch, dr_grpo(batch).advantages))


@_estimator(needs_critic=True, discounts=True)
def gae(batch: Batch) -> Estimate:
    """Generalized advantages, whitened over all sampled tokens; returns are not whitened.

    A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, and the critic's
    target is A_t + V_t. High-Dimensional Continuous Control Using Generalized Advantage
    Estimation, arXiv:1506.02438, equations 11 and 16. Here t + 1 is the next sampled token, and
    past the last one the value is 0, for a response that was cut too.

    Raises:
        ValueError: there is no critic.
    """
    if batch.values is None:
        raise ValueError("gae needs a critic's values, and the batch has none")
    advantages, returns = [], []
    for rewards, values, mask in zip(batch.token_rewards, batch.values, batch.masks, strict=True):
        sampled = mask != 0
        value = values[sampled]
        delta = rewards[sampled] + batch.gamma * np.append(value[1:], 0.0)[: len(value)] - value
        advantage = discounted_sums(delta, batch.gamma * batch.gae_lambda)
        advantages.append(_at(sampled, advantage))
        returns.append(_at(sampled, advantage + value))
    return Estimate(_whitened_tokens(batch, advantages), returns)


def _known_groups(groups: Sequence[str], rewards_S: np.ndarray) -> list[np.ndarray]:
    """Of each group with two known rewards or more, the indices of those."""
    known = [indices[~np.isnan(rewards_S[indices])] for indices in group_indices(groups)]
    return [indices for indices in known if len(indices) >= 2]


def _by_group(
    groups: Sequence[str], rewards_S: np.ndarray, rule: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """``rule`` of the known rewards of each group that has two; NaN elsewhere, 0 without spread."""
    advantages_S = np.full(len(rewards_S), np.nan)
    for known in _known_groups(groups, rewards_S):
        rewards = rewards_S[known]
        # The mean of equal numbers need not round to them, nor their deviation to 0.
        advantages_S[known] = rule(rewards) if has_spread(rewards) else 0.0
    return advantages_S


def _group_normalized(groups: Sequence[str], rewards_S: np.ndarray) -> np.ndarray:
    return _by_group(groups, rewards_S, lambda r: (r - r.mean()) / r.std(ddof=1))


def _returns(batch: Batch) -> list[np.ndarray]:
    """Discounted returns over sampled tokens, ragged; 0 elsewhere."""
    return [
        _at(mask != 0, discounted_sums(rewards[mask != 0], batch.gamma))
        for rewards, mask in zip(batch.token_rewards, batch.masks, strict=True)
    ]


def _whitened_tokens(batch: Batch, advantages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """``advantages`` whitened over the sampled tokens of samples with a reward; 0 elsewhere."""
    counts = [(mask != 0) & known for mask, known in zip(batch.masks, batch.is_known, strict=True)]
    tokens = [a[count] for a, count in zip(advantages, counts, strict=True)]
    flat = whitened(np.concatenate([np.zeros(0), *tokens]))
    parts = np.split(flat, np.cumsum([len(part) for part in tokens])[:-1])
    return [_at(count, part) for count, part in zip(counts, parts, strict=True)]


def _at(places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``values`` at ``places``, 0 elsewhere."""
    whole = np.zeros(len(places))
    whole[places] = values
    return whole
