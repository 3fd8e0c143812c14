"""Whether an evaluation can work, before anything heavy loads."""

from flows.config import Config, UserError
from flows.reward_checks import check_rewards
from stages.models import has_chat_template
from stages.rollout.rows import check_rows, data_digest
from stages.score.rewards import reward_digests
from stages.score.tokens import check_tokenizer


def check_evaluation(config: Config, context: int) -> None:
    """Refuse held-out data that isn't there, answers too long, and rewards that can't be called.

    Args:
        context: tokens that the run's engines hold of one sample.

    Raises:
        UserError, ValueError, TypeError: what is wrong, in a sentence.
    """
    evaluate = config.evaluate
    if evaluate is None:
        return
    if not evaluate.rewards and not config.score.rewards:
        raise UserError(
            "evaluate.rewards is empty, and score.rewards too, as pairs of the data say which "
            "response is the better one: name a reward for the answers to held-out prompts"
        )
    new = evaluate.max_new_tokens or config.rollout.max_new_tokens
    if new >= context:
        raise UserError(
            f"evaluate.max_new_tokens {new} leaves no room for a prompt in the {context} tokens "
            "that the engines hold: lower it, or raise rollout.max_new_tokens or "
            "data.max_prompt_tokens"
        )
    for data in evaluate.data.all_of(config.data.template):
        if data.template == "chat" and not has_chat_template(config.model):
            raise UserError(
                f"evaluate.data.template is chat, and model {config.model!r} has no chat "
                "template: set evaluate.data.template=plain"
            )
        try:
            data_digest(data)
            check_rows(data)
        except ValueError as error:
            raise UserError(f"evaluate.data: {error}") from error
    if evaluate.rewards is not None:
        reward_digests(evaluate.rewards)
        check_rewards(config, evaluate.rewards, context)
        if any(spec.per_token for spec in evaluate.rewards):
            check_tokenizer(config.model)


def evaluation_rows(config: Config) -> list[tuple[str, str, str]]:
    """The row of the plan about evaluation, where there is any."""
    evaluate = config.evaluate
    if evaluate is None:
        return []
    last = config.iterations
    count = sum(evaluate.is_due(version, last) for version in range(last + 1))
    return [("policies evaluated", str(count), "evaluate.every; the first and the last too")]
