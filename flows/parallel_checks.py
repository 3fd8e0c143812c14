"""Whether the ranks can be laid out as they were asked for: before anything heavy loads."""

from flows.config import Config, UserError
from flows.critic_checks import critic_model
from stages.models import attention_heads, changing_rope


def check_ranks(config: Config) -> None:
    """Refuse ranks that can't share sequences, and models that see whole rows only."""
    ranks, sp = config.resources.update.ranks, config.update.sp
    if ranks % sp:
        raise UserError(
            f"resources.update.ranks {ranks} doesn't divide by update.sp {sp}, the ranks that "
            f"share a sequence: take {_either(ranks, sp)} ranks, or another sp"
        )
    if sp == 1:
        return
    models = (
        [config.model] if config.update.critic is None else [config.model, critic_model(config)]
    )
    for model in models:
        heads = attention_heads(model)
        if heads and sp > heads:
            raise UserError(
                f"update.sp is {sp}, and model {model!r} has {heads} attention heads, which ranks "
                f"share out: take an sp of {heads} at most"
            )
        if kind := changing_rope(model):
            raise UserError(
                f"update.sp is {sp}, and model {model!r} has {kind} position embeddings, which "
                "change with the longest sequence of a row: ranks that hold a slice of it don't "
                "see that; take update.sp=1"
            )


def rank_rows(config: Config) -> list[tuple[str, str, str]]:
    """Rows of the plan about trainer ranks."""
    ranks, sp = config.resources.update.ranks, config.update.sp
    rows = [
        (
            "trainer ranks",
            str(ranks) if sp == 1 else f"{ranks // sp} × {sp}",
            "resources.update.ranks; × update.sp that share each sequence",
        ),
        (
            "tokens a micro-batch",
            str(config.update.max_tokens_per_rank * sp),
            "update.max_tokens_per_rank × update.sp",
        ),
    ]
    if sp > 1 and (heads := attention_heads(config.model)):
        share = -(-heads // sp)
        unfilled = share * sp - heads
        reason = f"the model's {heads} / update.sp"
        rows.append(
            (
                "attention heads a rank",
                str(share),
                f"{reason}, with {unfilled} of zeros" if unfilled else reason,
            )
        )
    return rows


def _either(ranks: int, sp: int) -> str:
    below = ranks - ranks % sp
    return f"{below} or {below + sp}" if below else str(sp)
