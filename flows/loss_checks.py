"""Whether what a user says about the loss fits together: before anything heavy loads."""

from flows.config import Config, UserError
from stages.update.config import LOSSES, PAIR_LOSSES, UpdateConfig

# Fields of the update that only these losses read.
_READ_BY = {
    "clip_dual": ("clip", "gspo"),
    "sapo_tau_pos": ("sapo",),
    "sapo_tau_neg": ("sapo",),
    "dpo_beta": PAIR_LOSSES,
    "dpo_label_smoothing": ("dpo",),
}


def check_loss(config: Config) -> None:
    """Refuse what a loss would not read, and pairs where none can be made."""
    update = config.update
    for name, losses in _READ_BY.items():
        value = getattr(update, name)
        is_set = value != UpdateConfig.model_fields[name].default
        if is_set and update.loss in LOSSES and update.loss not in losses:
            raise UserError(
                f"update.{name} is {value:g}, and update.loss {update.loss} does not read it: "
                f"leave it out, or take {' or '.join(losses)}"
            )
    if update.correction != "none" and update.old_logprobs == "sampler":
        raise UserError(
            f"update.correction is {update.correction}, and with update.old_logprobs=sampler the "
            "ratio itself is against the sampler: take old_logprobs=recompute, or correction=none"
        )
    if update.correction != "mis" and update.correction_floor > 0:
        raise UserError(
            f"update.correction_floor is {update.correction_floor:g}, and only update.correction="
            "mis has a lower bound: take it, or leave the floor out"
        )
    if update.correction_floor >= update.correction_cap:
        raise UserError(
            f"update.correction_floor {update.correction_floor:g} is not below "
            f"update.correction_cap {update.correction_cap:g}, so every token would be masked"
        )
    if update.compares_pairs:
        check_pairs(config)


def check_pairs(config: Config) -> None:
    """Refuse what a loss of preference pairs can't be combined with."""
    update = config.update
    if config.rollout.samples_per_prompt == 1:
        raise UserError(
            f"rollout.samples_per_prompt is 1, and update.loss {update.loss} compares the samples "
            "of a prompt: take 2 or more"
        )
    if update.correction != "none":
        raise UserError(
            f"update.loss {update.loss} takes pairs from whatever sampled them: "
            "leave update.correction at none"
        )
    if update.loss_aggregation != "token_mean":
        raise UserError(
            f"update.loss {update.loss} is a mean over pairs, and update.loss_aggregation "
            f"{update.loss_aggregation} is one of tokens: leave it out"
        )
