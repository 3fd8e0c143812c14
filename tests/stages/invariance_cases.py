"""What the invariance suite holds for: samples, configurations, and ways to lay a step out.

Importing it loads no torch.
"""

from dataclasses import dataclass, replace

import numpy as np

from made_samples import samples_of
from stages.update.config import UpdateConfig

TEMPERATURE = 0.7
VOCABULARY = 48
LOSSES = ("clip", "gspo", "cispo", "gmpo", "sapo", "reinforce")
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "fixed_length")
CORRECTIONS = (
    {"correction": "none"},
    {"correction": "tis", "correction_level": "token", "correction_cap": 1.1},
    {"correction": "tis", "correction_level": "sequence", "correction_cap": 1.1},
    {"correction": "mis", "correction_level": "token", "correction_floor": 0.8},
    {"correction": "mis", "correction_level": "sequence", "correction_floor": 0.6},
)
# Turned over with the cases, so that each loss meets each of them.
EXTRAS = (
    {},
    {"kl_coef": 0.3, "kl_estimator": "k3"},
    {"kl_coef": 0.3, "kl_estimator": "k3_weighted", "entropy_coef": 0.2},
    {"kl_coef": 0.3, "kl_estimator": "k2"},
    {"entropy_coef": 0.2},
    {"clip_dual": 1.3},
    {"kl_coef": 0.3, "kl_estimator": "k1"},
)
PAIRS = (
    {"loss": "dpo", "dpo_beta": 0.5},
    {"loss": "dpo", "dpo_label_smoothing": 0.2, "entropy_coef": 0.2},
    {"loss": "ipo", "dpo_beta": 0.5},
)


def _cases():
    combinations = [(a, b, c) for a in LOSSES for b in AGGREGATIONS for c in CORRECTIONS]
    for n, (loss, aggregation, correction) in enumerate(combinations):
        extra = EXTRAS[n % len(EXTRAS)]
        yield {"loss": loss, "loss_aggregation": aggregation, **correction, **extra}
    yield from PAIRS


def name_of(values):
    """A case's name in test ids."""
    return "-".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values.values())


CASES = {name_of(values): UpdateConfig(**values, dtype="float32") for values in _cases()}


@dataclass(frozen=True)
class Layout:
    """How a step is laid out: none of it may change what is computed.

    A new degree of freedom, such as ranks that share a sequence, is a field here.
    """

    max_tokens: int = 10_000
    chunk: int = 1024
    activation_checkpointing: bool = False
    shuffle: int = 0  # seed of another order of the samples; 0: as they are


LAYOUTS = (
    Layout(),
    Layout(max_tokens=1, chunk=3),
    Layout(max_tokens=40, activation_checkpointing=True, shuffle=1),
    Layout(max_tokens=75, chunk=7, shuffle=2),
    Layout(max_tokens=30, chunk=1, activation_checkpointing=True, shuffle=3),
)


def layouts_of(number, ranks):
    """Layouts that case ``number`` is computed in: on one rank the plain one and another, on more
    of them one; all take turns."""
    others = 1 + number % (len(LAYOUTS) - 1)
    return (0, others) if ranks == 1 else ((number + number // len(LAYOUTS)) % len(LAYOUTS),)


def samples():
    """Four groups of uneven answers: one cut in the middle by a tool's tokens, one empty, one
    without a reward, one whose advantage is 0, and two of equal reward."""
    random = np.random.RandomState(7)
    lengths = [3, 9, 1, 5, 0, 7, 2, 8, 6, 4, 1, 12]
    masks = [[1] * n for n in lengths]
    masks[11] = [1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 1]
    made = samples_of(
        [random.randint(4, VOCABULARY, n).tolist() for n in lengths],
        masks=masks,
        rewards=[1, 0, 0, 2, 5, 1, 0.5, np.nan, 0.25, 1, 1, 3],
        advantages=random.choice([-1, 1], 12) * random.uniform(0.5, 2, 12),
        weights=[1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1],
        groups=[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3],
    )
    made.advantages[9][:] = 0
    return made


def with_logprobs(made, now):
    """``made`` and old log-probs, near ``now``: (T,) a sample under the policy in training.

    Distances are such that bounds of every kind are passed by some tokens, and not by others.
    What a tool wrote was never sampled, and holds numbers that may not reach an exp().
    """
    random = np.random.RandomState(11)

    def near(spread):
        return [
            (v + random.normal(0, spread, len(v)) * (mask > 0)).astype(np.float32)
            for v, mask in zip(now, made.loss_masks, strict=True)
        ]

    old, sampler, reference = near(0.3), near(0.25), near(0.4)
    for values in (sampler, reference):
        values[11][made.loss_masks[11] == 0] = -1e4
    sampler = [(o + (s - n)).astype(np.float32) for o, s, n in zip(old, sampler, now, strict=True)]
    return replace(made, sampler_logprobs=sampler, reference_logprobs=reference), old
