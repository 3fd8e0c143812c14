"""pass@k: the chance that at least one of k answers is right, from n of which c are.

Unbiased: 1 - C(n-c, k) / C(n, k), as in arXiv:2107.03374, section 2.1.
"""

from collections.abc import Sequence


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Of one prompt, as the product that never forms a large binomial.

    Raises:
        ValueError: k is more than the samples, of which no estimate can be made.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}, and there are {num_samples} samples: take 1 to {num_samples}")
    num_wrong = num_samples - num_right
    if num_wrong < k:
        return 1.0
    none_right = 1.0
    for n in range(num_wrong + 1, num_samples + 1):
        none_right *= 1.0 - k / n
    return 1.0 - none_right


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> tuple[float | None, int]:
    """Mean over the prompts that have k samples or more, and how many have not.

    Args:
        counts: samples and right ones of each prompt.
    """
    values = [pass_at_k(samples, right, k) for samples, right in counts if samples >= k]
    return (sum(values) / len(values) if values else None), len(counts) - len(values)
