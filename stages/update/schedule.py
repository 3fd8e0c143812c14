"""The learning rate, a pure function of how many optimizer steps are finished."""

import math

from stages.update.config import CriticConfig, UpdateConfig


def learning_rate(config: UpdateConfig | CriticConfig, finished: int, total: int) -> float:
    """Rate of the step after ``finished`` steps, of ``total`` planned ones.

    A linear rise to ``lr`` over ``lr_warmup_steps``, then constant, or a fall to ``min_lr`` at
    ``total``: lr (1 - x) for linear, lr (1 + cos πx) / 2 for cosine, x from 0 to 1.
    """
    warmup = config.lr_warmup_steps
    if finished < warmup:
        return config.lr * (finished + 1) / warmup
    if config.lr_schedule == "constant":
        return config.lr
    x = min(1.0, (finished - warmup) / max(1, total - warmup))
    share = 1 - x if config.lr_schedule == "linear" else (1 + math.cos(math.pi * x)) / 2
    return config.min_lr + (config.lr - config.min_lr) * share
