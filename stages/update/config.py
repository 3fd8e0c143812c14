"""What a user says about the optimizer step."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from stages.settings import Section, execution
from stages.update.estimators import ESTIMATORS
from stages.update.presets import PRESETS, with_preset
from stages.user_code import is_import_path

# Fields that may name a user's function: where it lies is no identity, its source is, and enters
# an update's key by its digest.
FUNCTION_FIELDS = ("advantage",)


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
    clip_low: float = Field(0.2, gt=0, lt=1, description="ratio floor is 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="ratio ceiling is 1 + clip_high")
    kl_coef: float = Field(0.0, ge=0, description="weight of k3 against the reference model")
    old_logprobs: Literal["recompute", "sampler"] = Field(
        "recompute", description="denominator of the ratio: the trainer's own, or the engine's"
    )
    loss_aggregation: Literal["token_mean", "sequence_mean"] = Field(
        "token_mean", description="over all tokens of the step, or over sequences of token means"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount, a token")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="GAE's lambda")
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
    activation_checkpointing: bool = execution(False, description="less memory, more compute")

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

    def identity(self) -> dict[str, Any]:
        """The fields that change numbers; a user's function is ``:name``, wherever it lies."""
        names = {k: f":{path.split(':')[1]}" for k, path in self.function_paths().items()}
        return {**super().identity(), **names}
