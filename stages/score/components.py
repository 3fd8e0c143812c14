"""From each reward's outcome to a sample's reward: sums, nulls and error records.

What is rewarded per token and what is rewarded per sample are kept apart, and both together are
the sample's reward: ``reward`` sums the components of whole samples, ``token_rewards`` adds up
those per token at each token. Whoever adds ``reward`` and ``sum(token_rewards)`` counts every
component once.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.score.config import AnyReward
from stages.score.outcomes import Outcome


@dataclass(frozen=True)
class Scored:
    """A sample's columns: components by name, weighted sums, and what failed (JSON)."""

    components: dict[str, float | None]
    reward: float | None
    token_rewards: list[float] | None
    error: str | None


def combine(
    specs: Sequence[AnyReward], outcomes: Sequence[Outcome], sample_id: str, shard: int
) -> Scored:
    """The columns of the sample whose ``outcomes`` are those of ``specs``, in order.

    Both sums are null where a needed component is null.
    """
    pairs = list(zip(specs, outcomes, strict=True))
    is_whole = all(outcome.value is not None for spec, outcome in pairs if spec.is_needed)
    errors = [
        error_record(spec, outcome, sample_id, shard) for spec, outcome in pairs if outcome.failure
    ]
    return Scored(
        components={spec.column: outcome.value for spec, outcome in pairs},
        reward=_sample_sum(pairs) if is_whole else None,
        token_rewards=_token_sums(pairs) if is_whole else None,
        error=json.dumps(errors, ensure_ascii=False) if errors else None,
    )


def error_record(
    spec: AnyReward, outcome: Outcome, sample_id: str, shard: int
) -> Mapping[str, Any]:
    """What failed, where; who ran it stands in the ledger."""
    assert outcome.failure is not None
    return {
        "function": spec.column,
        "sample_id": sample_id,
        "shard": shard,
        "type": outcome.failure.type,
        "message": outcome.failure.message,
        "traceback": list(outcome.failure.traceback),
    }


def _sample_sum(pairs: Sequence[tuple[AnyReward, Outcome]]) -> float:
    return sum(
        (
            spec.weight * outcome.value
            for spec, outcome in pairs
            if spec.is_needed and not spec.per_token and outcome.value is not None
        ),
        start=0.0,
    )


def _token_sums(pairs: Sequence[tuple[AnyReward, Outcome]]) -> list[float] | None:
    parts = [
        [spec.weight * token for token in outcome.tokens]
        for spec, outcome in pairs
        if spec.is_needed and outcome.tokens is not None
    ]
    if not parts:
        return None
    return [sum(values) for values in zip(*parts, strict=True)]
