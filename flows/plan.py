"""What a configuration comes to, and whether it can work: before anything heavy loads."""

import json
from dataclasses import dataclass, field
from typing import Any

from artifacts.keys import canonical, key_of
from flows.config import Config, UserError
from flows.critic_checks import check_critic, critic_digest
from flows.evaluation_checks import check_evaluation, evaluation_rows
from flows.iteration import next_groups
from flows.loss_checks import check_loss
from flows.memory_rows import memory_rows
from flows.parallel_checks import check_ranks, rank_rows
from flows.preference_checks import check_responses
from flows.reward_checks import check_rewards, reward_rows
from stages.models import context_length, has_chat_template, model_digest, tokenizer_digest
from stages.rollout.rows import check_rows, data_digest
from stages.score.rewards import reward_digests
from stages.score.tokens import check_tokenizer
from stages.update.advantages import overlong_buffer
from stages.update.estimators import ESTIMATORS, Estimator, find_estimator
from stages.update.presets import preset_rows
from stages.update.run import function_digests
from stages.update.shaping import keeps_kl_coef_positive


@dataclass(frozen=True)
class Plan:
    """A checked configuration: derived sizes, and the digests that keys are made of."""

    config: Config
    context: int
    max_prompt_tokens: int
    model_digest: str
    tokenizer_digest: str
    data_digest: str
    functions: dict[str, str]
    update_functions: dict[str, str] = field(default_factory=dict)
    critic_digest: str | None = None

    @property
    def samples(self) -> int:
        """Samples that an iteration trains on."""
        return self.config.data.batch_size * self.config.rollout.samples_per_prompt

    @property
    def needs_reference(self) -> bool:
        """Whether anything reads log-probs of a reference model."""
        return self.config.update.needs_reference

    def identity(self) -> dict[str, Any]:
        """All that determines the run's numbers, as JSON values."""
        return {
            **self.config.identity(),
            "model_digest": self.model_digest,
            "tokenizer_digest": self.tokenizer_digest,
            "data_digest": self.data_digest,
            "functions": self.functions,
            "update_functions": self.update_functions,
            "critic_digest": self.critic_digest,
            # A learning rate that falls towards the end of the run depends on where that is.
            "total_steps": self.config.total_steps if self.config.update.has_decay else None,
        }

    def record(self) -> dict[str, Any]:
        """What a run keeps of it, as JSON values; see :func:`plan_of_record`."""
        return {
            "version": 1,
            "config": self.config.model_dump(mode="json"),
            "identity": json.loads(canonical(self.identity())),
            "context": self.context,
            "max_prompt_tokens": self.max_prompt_tokens,
        }

    def table(self) -> list[tuple[str, str, str]]:
        """Derived sizes: what, how much, from what."""
        config = self.config
        shards = -(-len(next_groups(config, [])) // config.rollout.prompts_per_shard)
        minibatch = config.data.batch_size // config.update.minibatches
        return [
            (
                "samples an iteration",
                str(self.samples),
                "data.batch_size × rollout.samples_per_prompt",
            ),
            *round_rows(config),
            (
                "shards a round" if config.rollout.fills_batch else "shards an iteration",
                str(shards),
                "prompts drawn / rollout.prompts_per_shard",
            ),
            responses_row(config, shards),
            ("prompts an optimizer step", str(minibatch), "data.batch_size / update.minibatches"),
            (
                "samples an optimizer step",
                str(minibatch * config.rollout.samples_per_prompt),
                "× rollout.samples_per_prompt",
            ),
            *rank_rows(config),
            ("optimizer steps a run", str(config.total_steps), "iterations × update.minibatches"),
            (
                "prompt limit, tokens",
                str(self.max_prompt_tokens),
                "data.max_prompt_tokens, or context less rollout.max_new_tokens",
            ),
            (
                "longest sample, tokens",
                str(self.max_prompt_tokens + config.rollout.max_new_tokens),
                f"the model's context is {context_length(config.model)}",
            ),
            (
                "reference model",
                "loaded" if self.needs_reference else "not loaded",
                "a KL in loss or reward, or a loss of preference pairs",
            ),
            (
                "critic",
                "not loaded" if config.update.critic is None else "loaded",
                "update.critic: values for advantages that need them",
            ),
            *memory_rows(config, self.max_prompt_tokens + config.rollout.max_new_tokens),
            *reward_rows(config),
            *preset_rows(config.update.model_dump()),
            *evaluation_rows(config),
        ]


def make_plan(config: Config) -> Plan:
    """Check ``config`` against its model, data and rewards.

    Raises:
        UserError: it can't work; one sentence with the numbers and the remedy.
    """
    try:
        check_sizes(config)
        check_responses(config)
        check_ranks(config)
        check_advantage(config)
        check_loss(config)
        limit = prompt_limit(config)
        check_critic(config)
        check_template(config)
        functions = reward_digests(config.score.rewards)
        check_rewards(config, config.score.rewards, limit + config.rollout.max_new_tokens)
        if any(spec.per_token for spec in config.score.rewards):
            check_tokenizer(config.model)
        digest = data_digest(config.data)
        check_rows(config.data)
        check_evaluation(config, limit + config.rollout.max_new_tokens)
        return Plan(
            config=config,
            context=limit + config.rollout.max_new_tokens,
            max_prompt_tokens=limit,
            model_digest=model_digest(config.model),
            tokenizer_digest=tokenizer_digest(config.model),
            data_digest=digest,
            functions=functions,
            update_functions=function_digests(config.update),
            critic_digest=critic_digest(config),
        )
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error


def plan_of_record(record: dict[str, Any]) -> Plan:
    """The plan that a run recorded: what it was, whatever has become of its model and data."""
    identity = record["identity"]
    return Plan(
        config=Config.model_validate(record["config"]),
        context=record["context"],
        max_prompt_tokens=record["max_prompt_tokens"],
        model_digest=identity["model_digest"],
        tokenizer_digest=identity["tokenizer_digest"],
        data_digest=identity["data_digest"],
        functions=identity["functions"],
        update_functions=identity["update_functions"],
        critic_digest=identity.get("critic_digest"),
    )


def check_sizes(config: Config) -> None:
    """Refuse what doesn't divide or has no place to run."""
    prompts, steps = config.data.batch_size, config.update.minibatches
    if prompts % steps:
        raise UserError(
            f"data.batch_size {prompts} doesn't divide by update.minibatches {steps}: "
            f"take {prompts - prompts % steps or steps} or "
            f"{prompts + steps - prompts % steps} prompts"
        )
    shards = -(-len(next_groups(config, [])) // config.rollout.prompts_per_shard)
    engines = config.resources.rollout.engines
    if engines > shards:
        raise UserError(
            f"resources.rollout.engines {engines} is more than an iteration's {shards} shards: "
            f"take fewer engines, or rollout.prompts_per_shard {max(1, prompts // engines)}"
        )
    if config.store.startswith("memory:"):
        raise UserError("store memory: is seen by one process only: name a folder or a bucket")


def check_advantage(config: Config) -> None:
    """Refuse an estimator without what it needs, and shaping that fits no estimator or length."""
    update, rollout = config.update, config.rollout
    estimator = find_estimator(update.advantage)
    if rollout.samples_per_prompt == 1:
        if estimator.compares_group:
            raise UserError(
                f"rollout.samples_per_prompt is 1, and {update.advantage} compares the samples of "
                "a prompt: take 2 or more"
            )
        if update.zero_spread == "drop":
            raise UserError(
                "rollout.samples_per_prompt is 1, and update.zero_spread=drop leaves out groups "
                "of equal rewards: all of them; take 2 or more, or keep them"
            )
    if update.gamma < 1 and not estimator.discounts and update.advantage in ESTIMATORS:
        raise UserError(
            f"update.gamma is {update.gamma:g}, and {update.advantage} does not discount: take "
            f"gamma 1, or one of {', '.join(n for n, e in ESTIMATORS.items() if e.discounts)}"
        )
    if overlong_buffer(update, rollout.max_new_tokens) > rollout.max_new_tokens:
        raise UserError(
            f"update.overlong_buffer_tokens {update.overlong_buffer_tokens} is more than "
            f"rollout.max_new_tokens {rollout.max_new_tokens}: take a part of it"
        )
    if rollout.fills_batch and update.zero_spread == "keep":
        raise UserError(
            f"rollout.max_rounds {rollout.max_rounds} and oversample {rollout.oversample:g} fill "
            "the batch with groups whose rewards differ, and update.zero_spread=keep keeps the "
            "others too: set update.zero_spread=drop"
        )
    check_reward_kl(config, estimator)


def check_reward_kl(config: Config, estimator: Estimator) -> None:
    """Refuse a KL in the reward that can have no effect, or whose coefficient can't adapt."""
    update = config.update
    if update.reward_kl_coef > 0 and estimator.normalizes_components:
        raise UserError(
            f"update.reward_kl_coef is {update.reward_kl_coef:g}, and {update.advantage} gives "
            "each part of the reward a scale of its own: take update.kl_coef instead"
        )
    if update.reward_kl_target is None:
        return
    if update.reward_kl_coef == 0:
        raise UserError(
            f"update.reward_kl_target is {update.reward_kl_target:g}, and reward_kl_coef 0 stays "
            "0 whatever is measured: give the coefficient to start from"
        )
    samples = most_groups(config) * config.rollout.samples_per_prompt
    if not keeps_kl_coef_positive(samples, update.reward_kl_horizon):
        raise UserError(
            f"update.reward_kl_horizon {update.reward_kl_horizon} is too short for an iteration "
            f"of {samples} samples, which could take the coefficient to 0: take more than "
            f"{samples // 5}"
        )


def prompt_limit(config: Config) -> int:
    """Longest prompt, in tokens. Refuses limits that pass the model's context."""
    context, new = context_length(config.model), config.rollout.max_new_tokens
    limit = config.data.max_prompt_tokens or context - new
    if limit < 1 or limit + new > context:
        raise UserError(
            f"a prompt of {max(limit, 1)} tokens and rollout.max_new_tokens {new} pass the model's "
            f"context of {context}: lower one of them"
        )
    return limit


def check_template(config: Config) -> None:
    """Refuse a chat template that isn't there."""
    if config.data.template == "chat" and not has_chat_template(config.model):
        raise UserError(
            f"data.template is chat, and model {config.model!r} has no chat template: "
            "set data.template=plain, or add chat_template.jinja to the model's folder"
        )


def most_groups(config: Config) -> int:
    """Groups that an iteration can draw at most: a whole batch in every round."""
    return config.rollout.max_rounds * len(next_groups(config, []))


def round_rows(config: Config) -> list[tuple[str, str, str]]:
    """Rows of the plan about rounds, where rounds fill the batch."""
    rollout, first = config.rollout, len(next_groups(config, []))
    if not rollout.fills_batch:
        return []
    most = most_groups(config)
    return [
        (
            "rounds an iteration",
            "1" if rollout.max_rounds == 1 else f"1 to {rollout.max_rounds}",
            "until data.batch_size groups have rewards that differ",
        ),
        (
            "prompts drawn an iteration",
            str(first) if first == most else f"{first} to {most}",
            "those missing × rollout.oversample, a round",
        ),
    ]


def responses_row(config: Config, shards: int) -> tuple[str, str, str]:
    """The row of the plan about who gives the responses of ``shards``."""
    if config.data.has_pairs:
        return "responses", "given, no engine loaded", "data.chosen and data.rejected"
    share = shards / config.resources.rollout.engines
    return "shards an engine", f"{share:g}", "shards / resources.rollout.engines"


def run_key(plan: Plan) -> str:
    """Digest of all that determines the run's numbers."""
    return key_of(plan.identity())
