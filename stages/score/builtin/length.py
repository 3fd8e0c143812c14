"""Rewards of a response's length, in tokens."""


def length(
    num_tokens: int, maximum: int, minimum: int = 0, slope_tokens: int = 0, **row: object
) -> float:
    """1.0 from ``minimum`` to ``maximum`` tokens, falling to 0.0 over ``slope_tokens`` outside."""
    outside = max(minimum - num_tokens, num_tokens - maximum, 0)
    if outside == 0:
        return 1.0
    return max(0.0, 1 - outside / slope_tokens) if slope_tokens else 0.0


def check_length(maximum: int | None = None, minimum: int = 0, slope_tokens: int = 0) -> None:
    """Raise ValueError where no length would be right."""
    if maximum is None or not 0 <= minimum <= maximum or slope_tokens < 0:
        raise ValueError(
            f"reward length: minimum {minimum}, maximum {maximum}, slope_tokens {slope_tokens}: "
            "give options with 0 <= minimum <= maximum and a slope of 0 or more"
        )


def soft_overlong(num_tokens: int, max_tokens: int, buffer_tokens: int, **row: object) -> float:
    """Soft overlong punishment, from 0.0 down to -1.0 (DAPO, Yu et al. 2025, eq. 13).

    0 up to ``max_tokens - buffer_tokens``, falling evenly to -1 at ``max_tokens``.
    """
    over = num_tokens - (max_tokens - buffer_tokens)
    return -min(max(over / buffer_tokens, 0.0), 1.0)


def check_soft_overlong(max_tokens: int = 0, buffer_tokens: int = 0) -> None:
    """Raise ValueError where the buffer is none, or longer than the response may be."""
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"reward soft_overlong: buffer_tokens {buffer_tokens}, max_tokens {max_tokens}: "
            "give options with 0 < buffer_tokens <= max_tokens"
        )
