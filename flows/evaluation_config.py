"""What a user says about held-out data and how it is answered.

None of it is identity of the training: with or without, every training byte is the same. All of
it that changes an evaluation's numbers is in that evaluation's own keys.
"""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from stages.rollout.config import DataConfig, DataSource, RolloutConfig
from stages.score.config import AnyReward
from stages.settings import Section, execution

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
# One token is left to choose from: the most likely one, whatever the seed.
_GREEDY = {"samples_per_prompt": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 1, "min_p": 0.0}


class EvaluationData(Section):
    """Held-out prompts: one file or several, each evaluated by itself."""

    path: str | None = execution(
        None, description="JSON lines or Parquet file, a path or fsspec URL; or give sources"
    )
    name: str = Field("data", min_length=1, description="of the one file, in metrics")
    prompt: str = Field("prompt", description="column of the prompt: text, or chat messages")
    answer: str | None = Field("answer", description="column that rewards get as ground_truth")
    sources: list[DataSource] = Field([], description="several files; their weights don't count")
    template: Literal["plain", "chat"] | None = Field(None, description="null: the run's own")
    overlong: Literal["fail", "skip"] = Field(
        "fail", description="a prompt over the limit: refuse the data, or skip and count the row"
    )

    @model_validator(mode="after")
    def _is_somewhere(self) -> "EvaluationData":
        if (self.path is None) == (not self.sources):
            raise ValueError("give either path, for one file of held-out prompts, or sources")
        for data in self.all_of("plain"):
            if data.has_pairs:
                raise ValueError(
                    "held-out prompts are answered by the policy, and chosen and rejected name "
                    "answers that are there: leave the two out"
                )
        return self

    def all_of(self, template: str) -> list[DataConfig]:
        """A data set for each source, its rows in order; ``template`` where none is given."""
        values = {"template": self.template or template, "overlong": self.overlong}
        sources = self.sources
        if self.path is not None:
            columns = {"prompt": self.prompt, "answer": self.answer}
            sources = [DataSource(path=self.path, name=self.name, **columns)]
        whole = DataConfig.model_validate({"sources": sources, **values})
        return [
            DataConfig.model_validate({"sources": [source], "shuffle": False, **values})
            for source in whole.all_sources
        ]


class EvaluateConfig(Section):
    """Evaluation on held-out data, of the starting model and of policies on the way."""

    every: int = execution(
        10, ge=1, description="iterations between evaluations; the first and last policy have one"
    )
    data: EvaluationData
    samples_per_prompt: int = Field(1, ge=0, description="sampled answers; 0: greedy alone")
    greedy: bool = Field(False, description="one greedy answer beside the sampled ones")
    k: list[int] = Field([1], description="of pass@k, each at most samples_per_prompt")
    verdict: float = Field(
        0.5, allow_inf_nan=False, description="a sample is right where its reward reaches it"
    )
    temperature: float | None = Field(None, gt=0, description="null: the rollout's")
    top_p: float | None = Field(None, gt=0, le=1, description="null: the rollout's")
    top_k: int | None = Field(None, ge=0, description="null: the rollout's")
    min_p: float | None = Field(None, ge=0, lt=1, description="null: the rollout's")
    max_new_tokens: int | None = Field(None, ge=1, description="null: the rollout's")
    max_prompts: int | None = Field(None, ge=1, description="first rows of a source; null: all")
    rewards: list[AnyReward] | None = Field(None, min_length=1, description="null: the score's")

    @field_validator("k")
    @classmethod
    def _is_positive(cls, value: list[int]) -> list[int]:
        if any(k < 1 for k in value) or len(set(value)) < len(value):
            raise ValueError("give different numbers from 1 on")
        return value

    @model_validator(mode="after")
    def _has_samples_enough(self) -> "EvaluateConfig":
        if self.samples_per_prompt == 0 and not self.greedy:
            raise ValueError(
                "samples_per_prompt is 0 and greedy is false, so nothing is answered: set one"
            )
        most = max(self.samples_per_prompt, 1)
        if self.k and max(self.k) > most:
            raise ValueError(
                f"pass@{max(self.k)} takes {max(self.k)} samples of a prompt, and "
                f"samples_per_prompt is {self.samples_per_prompt}: sample more, or lower k"
            )
        return self

    def modes(self, rollout: RolloutConfig) -> dict[str, RolloutConfig]:
        """Each way that prompts are answered in, where ``rollout`` is the training's."""
        own = {name: v for name in _SAMPLING if (v := getattr(self, name)) is not None}
        values = {**rollout.model_dump(), **own, "max_rounds": 1, "oversample": 1.0}
        found = {}
        if self.samples_per_prompt:
            sampled = {**values, "samples_per_prompt": self.samples_per_prompt}
            found["sampled"] = RolloutConfig.model_validate(sampled)
        if self.greedy:
            found["greedy"] = RolloutConfig.model_validate({**values, **_GREEDY})
        return found

    def is_due(self, version: int, last: int) -> bool:
        """Whether policy ``version`` is evaluated, in a run of ``last`` iterations."""
        return version in (0, last) or version % self.every == 0
