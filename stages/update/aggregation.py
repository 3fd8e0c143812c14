"""How much a token weighs in its optimizer step: ``update.loss_aggregation``. Pure Python.

The counts are always those of the whole step, over all micro-batches and ranks, so a step's loss
is one sum of weight x loss, and no split of the samples changes it.
"""

from collections.abc import Mapping, Sequence


def token_weights(
    counts: Mapping[int, int], aggregation: str, max_new_tokens: int
) -> dict[int, float]:
    """Weight of each chosen token of each sequence.

    Args:
        counts: sequence to chosen tokens, 1 or more; of every sequence that has a reward, whether
            its advantage is 0 or not.
        aggregation: with S sequences of n_i tokens, N in all: ``token_mean`` 1 / N (DAPO,
            arXiv:2503.14476, equation 8); ``sequence_mean`` 1 / (S n_i) (GRPO, arXiv:2402.03300,
            equation 3); ``sequence_sum`` 1 / S; ``fixed_length`` 1 / (S max_new_tokens) (Dr. GRPO,
            arXiv:2503.20783, section 3.2).
    """
    sequences, tokens = len(counts), sum(counts.values())
    divisors = {
        "token_mean": lambda count: tokens,
        "sequence_mean": lambda count: sequences * count,
        "sequence_sum": lambda count: sequences,
        "fixed_length": lambda count: sequences * max_new_tokens,
    }
    return {i: 1 / divisors[aggregation](count) for i, count in counts.items()}


def pair_weights(counts: Mapping[int, int], pairs: Sequence[tuple[int, int]]) -> dict[int, float]:
    """Weight of each chosen token of each member of ``pairs``, where every token carries the loss
    of its pair: the step's loss is the mean over pairs."""
    weights: dict[int, float] = {}
    for pair in pairs:
        weights |= dict.fromkeys(pair, 1 / (len(pairs) * sum(counts[i] for i in pair)))
    return weights
