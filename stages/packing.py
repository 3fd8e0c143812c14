"""Sharing samples out over ranks and micro-batches: sequences laid end to end, nothing padded."""

from collections.abc import Sequence


def plan_microbatches(
    lengths: Sequence[int], max_tokens: int, num_ranks: int
) -> list[list[list[int]]]:
    """Rank by rank, micro-batch by micro-batch, the indices of the samples in it.

    Every rank gets the same number of micro-batches, as they meet in collectives; some may be
    empty. A micro-batch holds at most ``max_tokens``, but for a sample that is longer by itself.
    Longest first into the emptiest micro-batch, so that they are of even size.

    Args:
        lengths: tokens of each sample.
        max_tokens: the budget of one micro-batch on one rank.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    # A sample longer than the budget is alone: no more micro-batches than samples are of use.
    most = -(-len(lengths) // num_ranks)
    num_rounds = max(1, min(most, -(-sum(lengths) // (max_tokens * num_ranks))))
    while (bins := _fill(order, lengths, max_tokens, num_rounds * num_ranks)) is None:
        num_rounds += 1
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def _fill(
    order: Sequence[int], lengths: Sequence[int], max_tokens: int, num_bins: int
) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [0] * num_bins
    for i in order:
        emptiest = min(range(num_bins), key=lambda b: (loads[b], b))
        if bins[emptiest] and loads[emptiest] + lengths[i] > max_tokens:
            return None
        bins[emptiest].append(i)
        loads[emptiest] += lengths[i]
    # Samples of one length side by side share one attention call on a CPU.
    return [sorted(members, key=lambda i: (lengths[i], i)) for members in bins]
