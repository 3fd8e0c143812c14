"""What a user says about the optimizer step."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from stages.settings import Section, execution
from stages.update.estimators import ESTIMATORS
from stages.update.presets import PRESETS, with_preset
from stages.user_code import is_import_path

# Fields that may name a user's function: where it lies is no identity, its source is, and enters
# an update's key by its digest.
FUNCTION_FIELDS = ("advantage", "loss")

# What `loss` may name; the functions are in losses.py, which loads torch.
LOSSES = ("clip", "gspo", "cispo", "gmpo", "sapo", "reinforce", "dpo", "ipo")
# Those that compare the best sample of a group with its worst.
PAIR_LOSSES = ("dpo", "ipo")


class CriticConfig(Section):
    """The critic: its model, its loss, and what its optimizer does not share with the policy's."""

    model: str | None = execution(
        None, description="folder of a Hugging Face model; null: what the policy starts from"
    )
    lr: float = Field(1e-5, gt=0, description="peak learning rate")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("constant")
    lr_warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear rise")
    min_lr: float = Field(0.0, ge=0, description="where a decay ends")
    value_clip: float | None = Field(
        0.2, gt=0, description="how far a value may gain by moving in an iteration; null: any"
    )
    warmup_iterations: int = Field(
        0, ge=0, description="the critic's first, in which it learns and the policy rests"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="its gradients are clipped to this norm")


class UpdateConfig(Section):
    """Algorithm, loss and optimizer."""

    # No identity of its own: what it sets is.
    algorithm: Literal[tuple(PRESETS)] = execution(  # type: ignore[valid-type]
        "grpo", description="a preset: sets the fields below that you don't; see `ratchet plan`"
    )
    advantage: str = Field(
        "grpo",
        description="how rewards become advantages: a name, module:function, file.py:function",
    )
    minibatches: int = Field(1, ge=1, description="optimizer steps an iteration")
    loss: str = Field(
        "clip",
        description="what a token costs: a name, module:function, file.py:function",
    )
    clip_low: float = Field(0.2, gt=0, le=1, description="ratio floor is 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="ratio ceiling is 1 + clip_high")
    clip_dual: float | None = Field(
        None, gt=1, description="clip and gspo: ceiling of the ratio where the advantage is < 0"
    )
    sapo_tau_pos: float = Field(1.0, gt=0, description="sapo: gate where the advantage is > 0")
    sapo_tau_neg: float = Field(1.05, gt=0, description="sapo: gate elsewhere; larger is tighter")
    dpo_beta: float = Field(0.1, gt=0, description="dpo, ipo: pull towards the reference")
    dpo_label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="dpo: how often a preference may be wrong"
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy, which is raised")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL from the reference model")
    kl_estimator: Literal["k1", "k2", "k3", "k3_weighted"] = Field(
        "k3", description="of that KL, by what its gradient is: see docs/algorithms.md"
    )
    old_logprobs: Literal["recompute", "sampler"] = Field(
        "recompute", description="denominator of the ratio: the trainer's own, or the engine's"
    )
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "fixed_length"] = (
        Field("token_mean", description="what the step's sum of token losses is divided by")
    )
    correction: Literal["none", "tis", "mis"] = Field(
        "none", description="weights old / sampler: truncated, or masked out of bounds"
    )
    correction_level: Literal["token", "sequence"] = Field(
        "token", description="weights of single tokens, or of whole responses"
    )
    correction_cap: float = Field(2.0, gt=0, description="upper bound of a weight")
    correction_floor: float = Field(0.0, ge=0, description="mis: lower bound of a weight")
    gamma: float = Field(1.0, gt=0, le=1, description="discount, a token")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="GAE's lambda")
    critic: CriticConfig | None = Field(
        None, description="what values and their returns are for; null: no critic is loaded"
    )
    reward_kl_coef: float = Field(
        0.0, ge=0, description="weight of k1, sampler against reference, in the reward"
    )
    reward_kl_target: float | None = Field(
        None, gt=0, description="nats a sample that reward_kl_coef adapts to; null: it is fixed"
    )
    reward_kl_horizon: int = Field(
        10_000, ge=1, description="samples over which it adapts; fewer: faster"
    )
    overlong: Literal["none", "filter"] = Field(
        "none", description="filter: responses cut at their limit teach nothing"
    )
    overlong_buffer_tokens: int | None = Field(
        0,
        ge=0,
        description="tokens before rollout.max_new_tokens over which a length penalty grows; "
        "0: none; null: a fifth of them",
    )
    overlong_penalty: float = Field(1.0, ge=0, description="the length penalty at the limit")
    zero_spread: Literal["keep", "drop"] = Field(
        "keep", description="drop: groups of equal rewards enter no count"
    )
    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("constant")
    lr_warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear rise")
    min_lr: float = Field(0.0, ge=0, description="where a decay ends")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW")
    adam_eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="of forward and backward; weights and reductions stay float32"
    )
    max_tokens_per_rank: int = execution(
        8192, ge=1, description="packed tokens of one forward and backward on one rank: memory"
    )
    sp: int = execution(
        1, ge=1, description="ranks that share each sequence, a slice each; divides the ranks"
    )
    activation_checkpointing: bool | Literal["auto"] = execution(
        "auto",
        description="less memory, more compute; auto: where the estimate of memory says that it "
        "takes it, or a rank ran out of it",
    )

    @model_validator(mode="before")
    @classmethod
    def _take_preset(cls, values: Any) -> Any:
        return with_preset(values) if isinstance(values, dict) else values

    @field_validator("advantage")
    @classmethod
    def _is_an_estimator(cls, value: str) -> str:
        if value not in ESTIMATORS and not is_import_path(value):
            raise ValueError(
                f"there is no such estimator; there are {', '.join(sorted(ESTIMATORS))}, and your "
                "own as module:function or file.py:function"
            )
        return value

    def own_values(self) -> dict[str, Any]:
        """The fields that neither the preset nor a default explains, as JSON values."""
        given = type(self)(algorithm=self.algorithm).model_dump(mode="json")
        return {k: v for k, v in self.model_dump(mode="json").items() if v != given[k]}

    def function_paths(self) -> dict[str, str]:
        """Field to import path, where it names the user's own function."""
        values = {name: getattr(self, name) for name in FUNCTION_FIELDS}
        return {name: value for name, value in values.items() if is_import_path(value)}

    @field_validator("loss")
    @classmethod
    def _is_a_loss(cls, value: str) -> str:
        if value not in LOSSES and not is_import_path(value):
            raise ValueError(
                f"there is no such loss; there are {', '.join(LOSSES)}, and your own as "
                "module:function or file.py:function"
            )
        return value

    @property
    def compares_pairs(self) -> bool:
        """Whether the loss is one of preference pairs."""
        return self.loss in PAIR_LOSSES

    @property
    def needs_reference(self) -> bool:
        """Whether the update reads log-probs of a reference model."""
        return self.kl_coef > 0 or self.reward_kl_coef > 0 or self.compares_pairs

    @property
    def has_decay(self) -> bool:
        """Whether a learning rate falls towards the end of the run."""
        schedules = {self.lr_schedule, self.critic.lr_schedule if self.critic else "constant"}
        return schedules != {"constant"}

    def identity(self) -> dict[str, Any]:
        """The fields that change numbers; a user's function is ``:name``, wherever it lies."""
        names = {k: f":{path.split(':')[1]}" for k, path in self.function_paths().items()}
        return {**super().identity(), **names}
