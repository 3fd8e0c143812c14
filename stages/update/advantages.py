"""From rewards as scored to what each token of an iteration is worth to the loss.

In this order: nulls are dropped; where the batch is filled over rounds, its groups are chosen;
penalties join the reward, and all of it gets its place on a token; the estimator sees the whole
batch; samples that are not to teach get weight 0. The order is the same on every rank, as each
one does all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stages.contract import StageError
from stages.groups import groups_with_spread, kept_by_null_policy, zero_spread_groups
from stages.update.batch import Batch, Component, Estimate
from stages.update.config import UpdateConfig
from stages.update.estimators import find_estimator
from stages.update.shaping import (
    at_sampled,
    overlong_penalty,
    token_kl,
    with_outcome,
)


@dataclass(frozen=True)
class Scored:
    """An iteration's samples as they were scored; float64, ragged columns as in ``batch.py``.

    Attributes:
        rewards_S: weighted sum of ``components``; NaN where it is null.
        token_rewards: rewards of single tokens, beside ``rewards_S``; None where none were given.
        max_new_tokens: longest response that the rollout allowed.
    """

    groups: Sequence[str]
    rewards_S: np.ndarray
    components: Sequence[Component]
    token_rewards: Sequence[np.ndarray] | None
    masks: Sequence[np.ndarray]
    sampler_logprobs: Sequence[np.ndarray] | None
    reference_logprobs: Sequence[np.ndarray] | None
    was_truncated_S: np.ndarray
    max_new_tokens: int
    values: Sequence[np.ndarray] | None = None


@dataclass(frozen=True)
class Advantages:
    """What the loss weighs tokens by.

    Attributes:
        advantages: (T,) a sample; 0 where the mask or the sample's weight is 0.
        returns: targets of the critic, (T,) a sample; None without one.
        rewards_S: all of a sample's reward, penalties too; NaN where it was dropped.
        weights_S: 1 where the sample enters the step's counts, else 0.
        chosen_S: whether the sample's group is one of the batch.
        reward_kl: mean over samples of KL(sampler‖reference), nats; None where it isn't in the
            reward, or no sample has a reward.
        metrics: for people.
    """

    advantages: list[np.ndarray]
    returns: list[np.ndarray] | None
    rewards_S: np.ndarray
    weights_S: np.ndarray
    chosen_S: np.ndarray
    reward_kl: float | None
    metrics: dict[str, float | None] = field(default_factory=dict)


def compute_advantages(
    scored: Scored, config: UpdateConfig, on_null: str, wanted: int | None = None
) -> Advantages:
    """Advantages and weights of all samples. ``config.reward_kl_coef`` is that of the iteration.

    Args:
        wanted: how many groups make up the batch: the first ones whose rewards differ. The others
            are to the estimator as if they had not been drawn. None: all groups make it up.

    Raises:
        StageError: the estimator gave something else than finite numbers, one a token; or there
            is a critic, and no values, or nothing for it to learn.
    """
    if config.critic is not None and scored.values is None:
        raise StageError(
            "update.critic is given, and the scores hold no values: score again with it given"
        )
    plain_S = scored.rewards_S + _sums(scored.token_rewards, len(scored.rewards_S))
    kept_S = kept_by_null_policy(scored.groups, plain_S, on_null)
    plain_S = np.where(kept_S, plain_S, np.nan)
    without_spread = zero_spread_groups(scored.groups, plain_S)
    chosen_S, counts = choose_groups(scored.groups, plain_S, wanted)
    plain_S = np.where(chosen_S, plain_S, np.nan)
    kl = _token_kls(scored) if config.reward_kl_coef > 0 else None
    penalty_S = _length_penalty(scored, config)
    batch = make_batch(scored, config, plain_S, penalty_S, kl)
    estimate = _checked(find_estimator(config.advantage).estimate(batch), batch, config.advantage)
    if config.critic is not None and estimate.returns is None:
        raise StageError(
            f"update.advantage {config.advantage} returned no returns, and update.critic learns "
            "them: return Estimate(advantages, returns), or leave update.critic out"
        )
    weights_S = _weights(scored, config, kept_S & chosen_S, without_spread)
    advantages = [
        a * (mask != 0) * weight
        for a, mask, weight in zip(estimate.advantages, scored.masks, weights_S, strict=True)
    ]
    metrics: dict[str, float | None] = {
        **_statistics(advantages, scored.masks, weights_S),
        "update/null_samples": float((~kept_S).sum()),
        "update/zero_spread_groups": float(len(without_spread)),
        **counts,
        "update/overlong_share": float((scored.was_truncated_S | (penalty_S < 0)).mean()),
    }
    reward_kl = None
    if kl is not None:
        reward_kl = _mean(_sums(kl, len(kl))[kept_S])
        metrics |= {"update/reward_kl": reward_kl, "update/reward_kl_coef": config.reward_kl_coef}
    returns = None if estimate.returns is None else list(estimate.returns)
    return Advantages(advantages, returns, batch.rewards_S, weights_S, chosen_S, reward_kl, metrics)


def choose_groups(
    groups: Sequence[str], rewards_S: np.ndarray, wanted: int | None
) -> tuple[np.ndarray, dict[str, float]]:
    """Whether each sample is one of the batch, (S,), and counts of groups, for people.

    The batch is the first ``wanted`` groups whose known rewards differ; with None, every group.
    DAPO, arXiv:2503.14476, section 3.2.
    """
    if wanted is None:
        return np.ones(len(groups), dtype=bool), {}
    found = groups_with_spread(groups, rewards_S)
    chosen_S = np.zeros(len(groups), dtype=bool)
    for members in found[:wanted]:
        chosen_S[members] = True
    return chosen_S, {
        "update/drawn_groups": float(len(set(groups))),
        "update/surplus_groups": float(max(0, len(found) - wanted)),
        "update/short_groups": float(max(0, wanted - len(found))),
    }


def make_batch(
    scored: Scored,
    config: UpdateConfig,
    plain_S: np.ndarray,
    penalty_S: np.ndarray,
    kl: Sequence[np.ndarray] | None,
) -> Batch:
    """What the estimator sees. ``plain_S``: rewards without penalties, NaN where dropped."""
    outcomes_S = np.where(np.isnan(plain_S), 0.0, scored.rewards_S) + penalty_S
    rewards_S = plain_S + penalty_S
    token_rewards = []
    for i, mask in enumerate(scored.masks):
        dense = np.zeros(len(mask))
        if scored.token_rewards is not None:
            dense = at_sampled(scored.token_rewards[i], mask)
        if kl is not None:
            dense = dense - config.reward_kl_coef * kl[i]
            rewards_S[i] -= config.reward_kl_coef * kl[i].sum()
        is_known = not np.isnan(plain_S[i])
        token_rewards.append(with_outcome(dense, outcomes_S[i], mask) * is_known)
    components = list(scored.components)
    if scored.token_rewards is not None:
        components.append(
            Component("token rewards", 1.0, _sums(scored.token_rewards, len(plain_S)))
        )
    if penalty_S.any():
        components.append(Component("length penalty", 1.0, penalty_S))
    return Batch(
        groups=scored.groups,
        rewards_S=rewards_S,
        components=components,
        token_rewards=token_rewards,
        masks=scored.masks,
        values=scored.values,
        sampler_logprobs=scored.sampler_logprobs,
        reference_logprobs=scored.reference_logprobs,
        was_truncated_S=scored.was_truncated_S,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
    )


def _weights(
    scored: Scored,
    config: UpdateConfig,
    known_S: np.ndarray,
    without_spread: Sequence[np.ndarray],
) -> np.ndarray:
    """1 for samples that are to teach, else 0, (S,)."""
    weights_S = known_S.astype(np.float64)
    if config.overlong == "filter":
        weights_S[scored.was_truncated_S] = 0
    if config.zero_spread == "drop":
        for members in without_spread:
            weights_S[members] = 0
    return weights_S


def overlong_buffer(config: UpdateConfig, max_new_tokens: int) -> int:
    """Tokens before the limit over which the length penalty grows; 0: no penalty."""
    if config.overlong_buffer_tokens is None:
        return max_new_tokens // 5
    return config.overlong_buffer_tokens


def _length_penalty(scored: Scored, config: UpdateConfig) -> np.ndarray:
    buffer = overlong_buffer(config, scored.max_new_tokens)
    if buffer == 0:
        return np.zeros(len(scored.rewards_S))
    lengths_S = np.array([np.count_nonzero(mask) for mask in scored.masks])
    penalty_S = overlong_penalty(lengths_S, scored.max_new_tokens, buffer)
    return config.overlong_penalty * penalty_S


def _token_kls(scored: Scored) -> list[np.ndarray]:
    if scored.reference_logprobs is None:
        raise StageError(
            "update.reward_kl_coef is above 0, and the scores hold no reference log-probs: "
            "score again with it set"
        )
    if scored.sampler_logprobs is None:
        raise StageError(
            "update.reward_kl_coef is above 0, and responses were given, not sampled: there is "
            "no sampler's log-prob to measure by; set it to 0"
        )
    columns = (scored.sampler_logprobs, scored.reference_logprobs, scored.masks)
    return [token_kl(*tokens) for tokens in zip(*columns, strict=True)]


def _checked(estimate: Estimate, batch: Batch, name: str) -> Estimate:
    """``estimate``, if it has a finite number for each token."""
    if not isinstance(estimate, Estimate):
        raise StageError(
            f"update.advantage {name} returned a {type(estimate).__name__}: "
            "return batch.per_sample(advantages), or an Estimate"
        )
    for what, column in (("advantages", estimate.advantages), ("returns", estimate.returns)):
        if column is None:
            continue
        if len(column) != len(batch.masks):
            raise StageError(
                f"update.advantage {name} returned {what} of {len(column)} samples, "
                f"and there are {len(batch.masks)}"
            )
        for i, (values, mask) in enumerate(zip(column, batch.masks, strict=True)):
            if np.shape(values) != np.shape(mask) or not np.isfinite(values).all():
                raise StageError(
                    f"update.advantage {name} returned {what} of sample {i} "
                    f"({batch.groups[i]}) that are not {len(mask)} finite numbers"
                )
    return estimate


def _statistics(
    advantages: Sequence[np.ndarray], masks: Sequence[np.ndarray], weights_S: np.ndarray
) -> dict[str, float | None]:
    """Over the sampled tokens of samples with weight."""
    used = [a[m != 0] for a, m, w in zip(advantages, masks, weights_S, strict=True) if w > 0]
    tokens = np.concatenate([np.zeros(0), *used])
    names = ("mean", "std", "min", "max")
    if not len(tokens):
        return {f"update/advantage_{name}": None for name in names}
    return {f"update/advantage_{name}": float(getattr(tokens, name)()) for name in names}


def _sums(parts: Sequence[np.ndarray] | None, count: int) -> np.ndarray:
    return np.zeros(count) if parts is None else np.array([part.sum() for part in parts])


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
