"""Whether reward models and judges can read what this run writes: before anything heavy loads."""

from collections.abc import Sequence
from pathlib import Path

from flows.config import Config, UserError
from stages.score.checkpoint import position_limit, template_of
from stages.score.config import AnyReward, judges
from stages.score.judge_spec import api_key_of
from stages.score.reward_model_spec import RewardModelSpec


def check_rewards(config: Config, rewards: Sequence[AnyReward], longest: int) -> None:
    """Refuse a reward model that can't read the samples, and a judge whose key is not there.

    Args:
        rewards: the run's, or those of its evaluations.
        longest: tokens of the longest sample, in the policy's tokens.
    """
    for spec in reward_models(rewards):
        if config.data.template == "chat" and spec.template is None and template_of(spec) != "chat":
            raise UserError(
                f"reward {spec.column!r}: data.template is chat, and model {spec.model!r} has no "
                "chat template: add chat_template.jinja to its folder, or set template: pair, or "
                "plain, and it reads the prompt as the policy's template wrote it"
            )
        limit = position_limit(spec)
        if limit is not None and limit < longest and _has_vocabulary_of(config.model, spec):
            raise UserError(
                f"reward {spec.column!r}: model {spec.model!r} reads {limit} tokens, and the "
                f"longest sample has {longest} of the same tokenizer: lower data.max_prompt_tokens "
                "or rollout.max_new_tokens"
            )
    for judge in judges(rewards):
        api_key_of(judge)


def reward_rows(config: Config) -> list[tuple[str, str, str]]:
    """Rows of the plan about what is asked for rewards beside functions."""
    models = [
        (f"reward {spec.column}", spec.model, _model_source(config, spec))
        for spec in reward_models(config.score.rewards)
    ]
    asked = [
        (f"reward {spec.column}", spec.model, f"a judge at {spec.judge}")
        for spec in judges(config.score.rewards)
    ]
    return [*models, *asked]


def reward_models(rewards: Sequence[AnyReward]) -> list[RewardModelSpec]:
    """Those of ``rewards`` that models give."""
    return [spec for spec in rewards if isinstance(spec, RewardModelSpec)]


def _model_source(config: Config, spec: RewardModelSpec) -> str:
    count = config.resources.reward_model.workers
    return (
        f"a reward model of context {position_limit(spec) or 'unknown'}, template "
        f"{template_of(spec)}, on {count} worker{'s' if count > 1 else ''} of its own"
    )


def _has_vocabulary_of(model: str, spec: RewardModelSpec) -> bool:
    """Whether a text has as many tokens for both: their ``tokenizer.json`` is the same."""
    files = [Path(folder, "tokenizer.json") for folder in (model, spec.model)]
    return all(f.is_file() for f in files) and files[0].read_bytes() == files[1].read_bytes()
