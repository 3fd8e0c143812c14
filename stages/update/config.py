"""What a user says about the optimizer step."""

from typing import Literal

from pydantic import Field

from stages.settings import Section, execution


class UpdateConfig(Section):
    """Algorithm, loss and optimizer."""

    algorithm: Literal["grpo"] = Field("grpo", description="how rewards become advantages")
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
