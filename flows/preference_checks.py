"""Whether what learns fits where responses come from: sampled and rewarded, or given in pairs."""

from collections.abc import Iterator
from typing import Any

from flows.config import Config, UserError
from stages.rollout.config import PAIR
from stages.settings import Section
from stages.update.config import PAIR_LOSSES

# Fields that speak of sampling, or of what samples a reward leaves to learn from.
_OF_SAMPLES = {
    "rollout": (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "deterministic",
        "max_rounds",
        "oversample",
    ),
    "update": (
        "advantage",
        "old_logprobs",
        "correction",
        "gamma",
        "gae_lambda",
        "reward_kl_coef",
        "reward_kl_target",
        "overlong",
        "overlong_buffer_tokens",
        "zero_spread",
    ),
}


def check_responses(config: Config) -> None:
    """Refuse rewards without samples, samples without rewards, and what given pairs can't obey."""
    if not config.data.has_pairs:
        if not config.score.rewards:
            raise UserError(
                "score.rewards is empty, and a sampled response has no other reward: name one, or "
                "give data.chosen and data.rejected to learn from pairs"
            )
        return
    if config.update.loss not in PAIR_LOSSES:
        raise UserError(
            f"data.chosen gives pairs, and update.loss {config.update.loss} learns from rewards of "
            f"samples: take update.algorithm={' or '.join(PAIR_LOSSES)}"
        )
    if config.score.rewards:
        names = ", ".join(spec.column for spec in config.score.rewards)
        raise UserError(
            f"score.rewards has {names}, and data.chosen says which response is the better one: "
            "leave score.rewards out"
        )
    if config.rollout.samples_per_prompt != len(PAIR):
        raise UserError(
            f"rollout.samples_per_prompt is {config.rollout.samples_per_prompt}, and a pair of the "
            f"data is {len(PAIR)} responses: leave it out"
        )
    for field, value in _set_fields(config):
        raise UserError(
            f"{field} is {value}, and data.chosen gives the responses, so nothing is sampled: "
            "leave it out"
        )


def _set_fields(config: Config) -> Iterator[tuple[str, Any]]:
    """Of those fields, the ones that have another value than their default."""
    for section, names in _OF_SAMPLES.items():
        part: Section = getattr(config, section)
        for name in names:
            value = getattr(part, name)
            if value != type(part).model_fields[name].get_default(call_default_factory=True):
                yield f"{section}.{name}", value
