"""What the invariance suite holds for: samples, configurations, models, and ways to lay a step out.

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

PAIR_NAMES = [name_of(values) for values in PAIRS]
# With a KL and an entropy, and with a ratio and a weight of whole sequences.
SHAPE_CASES = (
    "clip-token_mean-tis-sequence-1.1-0.3-k3_weighted-0.2",
    next(n for n in CASES if n.startswith("gspo-sequence_mean-mis-sequence")),
)


@dataclass(frozen=True)
class Layout:
    """How a step is laid out: none of it may change what is computed."""

    max_tokens: int = 10_000
    chunk: int = 1024
    activation_checkpointing: bool = False
    shuffle: int = 0  # seed of another order of the samples; 0: as they are
    sp: int = 1  # ranks that share each sequence


LAYOUTS = (
    Layout(),
    Layout(max_tokens=1, chunk=3),
    Layout(max_tokens=40, activation_checkpointing=True, shuffle=1),
    Layout(max_tokens=75, chunk=7, shuffle=2),
    Layout(max_tokens=30, chunk=1, activation_checkpointing=True, shuffle=3),
)


@dataclass(frozen=True)
class Shape:
    """A model: its family and how its heads divide."""

    kind: str
    heads: int
    kv_heads: int
    layers: int = 2


def shape_name(shape):
    """A shape's name in test ids and folders."""
    return f"{shape.kind}-{shape.heads}-{shape.kv_heads}"


SMALL = Shape("llama", 4, 2, layers=1)  # what every case is computed with
# Those of SmolLM2, Qwen2.5-0.5B and Qwen3, and a single key/value head for all ranks.
SHAPES = (Shape("llama", 9, 3), Shape("qwen2", 14, 2), Shape("qwen3", 8, 4), Shape("llama", 8, 1))
# Ranks to how many of them share a sequence, in turn.
SHARED = {1: (1,), 2: (1, 2), 4: (1, 2, 4), 8: (4,)}


@dataclass(frozen=True)
class Job:
    """A case, by name, with a model in a layout."""

    shape: Shape
    case: str
    layout: Layout


def jobs_of(ranks, is_thorough):
    """What is computed on so many ranks.

    With the small model every case on one rank, in the plain layout and another, and on two, in
    one; all layouts take turns. Where ranks share sequences, and on more than two, a case of each
    loss has to do, unless ``is_thorough``. Of the other models, one case or two.
    """
    for number, name in enumerate(CASES):
        others = 1 + number % (len(LAYOUTS) - 1)
        turn = (number + number // len(LAYOUTS)) % len(LAYOUTS)
        is_one_of_its_loss = number % 19 == 0 or name in PAIR_NAMES
        for sp in SHARED[ranks]:
            if is_one_of_its_loss or (sp == 1 and ranks <= 2) or (is_thorough and ranks == 4):
                for layout in (0, others) if ranks == 1 else (turn,):
                    yield Job(SMALL, name, replace(LAYOUTS[layout], sp=sp))
    for n, shape in enumerate(SHAPES):
        pairs = list(zip(SHAPE_CASES, (LAYOUTS[2], LAYOUTS[3]), strict=True))
        for name, layout in pairs if is_thorough else [pairs[n % 2]]:
            for sp in SHARED[ranks]:
                if ranks == 1 or sp > 1:
                    yield Job(shape, name, replace(layout, sp=sp))


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
