"""Random numbers of an optimizer step: drawn anew for each, so that none has a past to restore."""

import random

import numpy as np
import torch

from artifacts.keys import key_of


def seed_step(rollout_digest: str, step: int, dp_rank: int) -> None:
    """Seed python, numpy and torch for optimizer step ``step`` on a rank of row ``dp_rank``.

    Dropout, or a loss of the user's own that samples, then gives the same in any replay and after
    any resume. Ranks that share a sequence draw alike, as they compute one loss. The digest of the
    rollout stands for the run's seed and all that came before.
    """
    seed = int(key_of({"rollout": rollout_digest, "step": step, "rank": dp_rank})[:16], 16)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
