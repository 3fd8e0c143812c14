"""What becomes of rewards before advantages are taken: penalties, and their places.

Pure functions of arrays, float64. S samples; T response tokens of one of them.
"""

import numpy as np

# Ziegler et al. bound what one iteration says about the KL.
_ERROR_LIMIT = 0.2


def overlong_penalty(lengths_S: np.ndarray, limit: int, buffer: int) -> np.ndarray:
    """DAPO's soft punishment of length, from 0 to -1, (S,).

    0 up to ``limit - buffer`` tokens, then falling linearly to -1 at ``limit``, and -1 past it.
    DAPO, arXiv:2503.14476, equation 13.
    """
    penalty_S: np.ndarray = np.clip((limit - buffer - lengths_S) / buffer, -1.0, 0.0)
    return penalty_S


def token_kl(sampler_T: np.ndarray, reference_T: np.ndarray, mask_T: np.ndarray) -> np.ndarray:
    """k1 of each sampled token, (T,): log-prob under the sampler less that under the reference.

    Its sum over a response is unbiased for KL(sampler‖reference). Schulman, "Approximating KL
    Divergence", 2020.
    """
    kl_T: np.ndarray = (sampler_T.astype(np.float64) - reference_T) * (mask_T != 0)
    return kl_T


def at_sampled(rewards_T: np.ndarray, mask_T: np.ndarray) -> np.ndarray:
    """``rewards_T`` with each reward on a sampled token, (T,).

    One that stands on a token of the environment is moved to the last sampled token before it,
    which it answers; before the first one, to that. Without a sampled token all is 0.
    """
    moved_T = np.zeros(len(mask_T))
    places = np.flatnonzero(mask_T)
    if len(places):
        owners_T = np.searchsorted(places, np.arange(len(mask_T)), side="right") - 1
        np.add.at(moved_T, places[np.maximum(owners_T, 0)], rewards_T)
    return moved_T


def with_outcome(rewards_T: np.ndarray, outcome: float, mask_T: np.ndarray) -> np.ndarray:
    """``rewards_T`` with ``outcome`` added on the last sampled token, (T,)."""
    places = np.flatnonzero(mask_T)
    whole_T = np.array(rewards_T, dtype=np.float64)
    whole_T[places[-1:]] += outcome
    return whole_T


def next_kl_coef(
    coef: float, kl: float | None, target: float, horizon: int, num_samples: int
) -> float:
    """The coefficient of the next iteration, from ``kl`` measured in this one.

    coef (1 + num_samples / horizon e), e = clip(kl / target - 1, -0.2, 0.2). Fine-Tuning Language
    Models from Human Preferences, arXiv:1909.08593, section 2.2.

    Args:
        kl, target: nats a sample. None: nothing was measured, and nothing changes.
        horizon: samples; a smaller one adapts faster.
    """
    if kl is None:
        return coef
    error = float(np.clip(kl / target - 1, -_ERROR_LIMIT, _ERROR_LIMIT))
    return coef * (1 + num_samples / horizon * error)


def keeps_kl_coef_positive(num_samples: int, horizon: int) -> bool:
    """Whether :func:`next_kl_coef` can't reach 0 or less, whatever is measured."""
    return num_samples * _ERROR_LIMIT < horizon
