"""Whether a critic is where one is needed, and can be made: before anything heavy loads."""

from flows.config import Config, UserError
from stages.models import check_value_model, context_length, model_digest, vocabulary_size
from stages.update.estimators import ESTIMATORS


def check_critic(config: Config) -> None:
    """Refuse an estimator without the critic it needs, and a critic that nothing reads."""
    update = config.update
    needs_one = update.advantage in ESTIMATORS and ESTIMATORS[update.advantage].needs_critic
    if update.critic is None:
        if needs_one:
            raise UserError(
                f"update.advantage {update.advantage} needs a critic, and update.critic is null: "
                "take update.algorithm=ppo, which has one, or give the section"
            )
        return
    if update.advantage in ESTIMATORS and not needs_one:
        raise UserError(
            f"update.critic is given, and update.advantage {update.advantage} reads no values: "
            "leave update.critic out, or take update.advantage=gae"
        )
    if update.compares_pairs:
        raise UserError(
            f"update.critic is given, and update.loss {update.loss} learns from pairs, without "
            "advantages: leave update.critic out"
        )
    check_critic_model(config)


def check_critic_model(config: Config) -> None:
    """Refuse a model that gives no values, or can't read what the policy writes."""
    model = critic_model(config)
    try:
        check_value_model(model)
    except ValueError as error:
        raise UserError(f"update.critic: {error}") from error
    for name, size in (("context", context_length), ("vocabulary", vocabulary_size)):
        have, need = size(model), size(config.model)
        if have < need:
            raise UserError(
                f"update.critic.model {model} has a {name} of {have}, and the policy's is {need}: "
                "give one that reads what the policy writes"
            )


def critic_model(config: Config) -> str:
    """The folder that the critic is made from."""
    critic = config.update.critic
    return (critic.model if critic is not None else None) or config.model


def critic_digest(config: Config) -> str | None:
    """Digest of that folder; None without a critic."""
    return None if config.update.critic is None else model_digest(critic_model(config))
