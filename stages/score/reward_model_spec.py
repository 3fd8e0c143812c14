"""What a user says about a reward that a sequence classifier gives."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from stages.score.component_spec import ComponentSpec
from stages.settings import execution


class RewardModelSpec(ComponentSpec):
    """A reward model: the folder of a Hugging Face sequence classifier, with its tokenizer."""

    # Called with all samples of a shard, and for each one as a whole.
    batched: ClassVar[bool] = True
    per_token: ClassVar[bool] = False

    # Where the folder lies is no identity: its files are, and enter keys by their digest.
    model: str = execution(..., description="folder of a Hugging Face sequence classifier")
    label: str | None = Field(None, description="whose logit is the reward; null: there is one")
    template: Literal["chat", "plain", "pair"] | None = Field(
        None,
        description="chat: the model's own; plain: prompt and response as one text; pair: as the "
        "tokenizer joins two texts; null: chat where its tokenizer has a template, else plain",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of weights and computation; auto: as the folder's files are"
    )
    max_tokens_per_batch: int = execution(
        16384, ge=1, description="padding included; a longer sample is computed alone"
    )

    @property
    def column(self) -> str:
        return self.name or "reward_model"

    def identity(self) -> dict[str, Any]:
        return {"kind": "model", **super().identity()}


@dataclass(frozen=True)
class RewardModelJob:
    """What a reward model's worker is made of.

    Attributes:
        digest: of the folder that the scores' key names; None: any will do.
    """

    spec: RewardModelSpec
    digest: str | None = None
