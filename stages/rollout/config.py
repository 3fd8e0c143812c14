"""What a user says about prompts and sampling."""

from typing import Any, Literal

from pydantic import Field, model_validator

from stages.settings import Section, execution

_CHOSEN = "column of the better of two given responses, text or messages; null: they are sampled"
_REJECTED = "column of the worse one"


# Sample 0 of a given group is the chosen response, sample 1 the rejected one.
PAIR = ("chosen", "rejected")


def _without_answer(values: Any) -> Any:
    """Pairs need no right answer: where ``answer`` is left open, none is looked for."""
    has_pairs = isinstance(values, dict) and values.get("chosen") is not None
    return {"answer": None, **values} if has_pairs else values


class DataSource(Section):
    """One file of prompts, and its share."""

    path: str = execution(..., description="JSON lines or Parquet file, a path or fsspec URL")
    name: str = Field("", description="in shards and metrics; default: data-1, data-2, …")
    weight: float = Field(1.0, gt=0, description="chance that a draw takes from it, relative")
    prompt: str = Field("prompt", description="column of the prompt: text, or chat messages")
    answer: str | None = Field("answer", description="column that rewards get as ground_truth")
    chosen: str | None = Field(None, description=_CHOSEN)
    rejected: str | None = Field(None, description=_REJECTED)

    @model_validator(mode="before")
    @classmethod
    def _needs_no_answer(cls, values: Any) -> Any:
        return _without_answer(values)

    @property
    def columns(self) -> list[str | None]:
        """What its rows are read by; a pair's two columns where it has any."""
        pair = [self.chosen, self.rejected]
        return [self.prompt, self.answer, *(pair if any(pair) else [])]


class DataConfig(Section):
    """The prompts: where they lie, which columns count, how many an iteration takes."""

    path: str | None = execution(
        None, description="JSON lines or Parquet file, a path or fsspec URL; or give sources"
    )
    prompt: str = Field("prompt", description="column of the prompt: text, or chat messages")
    answer: str | None = Field("answer", description="column that rewards get as ground_truth")
    chosen: str | None = Field(None, description=_CHOSEN)
    rejected: str | None = Field(None, description=_REJECTED)
    sources: list[DataSource] = Field([], description="several files, mixed by weight")
    template: Literal["plain", "chat"] = Field(
        "chat", description="chat: the tokenizer's chat template; plain: the text as it stands"
    )
    batch_size: int = Field(32, ge=1, description="prompts an iteration")
    shuffle: bool = Field(True, description="a new order each epoch, drawn from the seed")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="longest prompt; null: what the model's context leaves"
    )
    overlong: Literal["fail", "skip"] = Field(
        "fail", description="a prompt over the limit: refuse the data, or skip and count the row"
    )

    @model_validator(mode="before")
    @classmethod
    def _needs_no_answer(cls, values: Any) -> Any:
        return _without_answer(values)

    @model_validator(mode="after")
    def _is_somewhere(self) -> "DataConfig":
        if (self.path is None) == (not self.sources):
            raise ValueError("give either data.path, for one file, or data.sources, for several")
        names = [source.name for source in self.all_sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two data sources are named {name!r}: give one another name")
        return self

    @model_validator(mode="after")
    def _has_whole_pairs(self) -> "DataConfig":
        columns = [column for s in self.all_sources for column in (s.chosen, s.rejected)]
        if any(columns) and not all(columns):
            raise ValueError(
                "a pair is two columns, in every source or in none: give both chosen and rejected"
            )
        return self

    @property
    def has_pairs(self) -> bool:
        """Whether responses come from the data, two a prompt, and none is sampled."""
        return any(source.chosen or source.rejected for source in self.all_sources)

    @property
    def all_sources(self) -> list[DataSource]:
        """Every file of prompts with its name and columns, in order."""
        if self.path is not None:
            return [
                DataSource(
                    path=self.path,
                    name="data",
                    prompt=self.prompt,
                    answer=self.answer,
                    chosen=self.chosen,
                    rejected=self.rejected,
                )
            ]
        return [
            source.model_copy(update={"name": source.name or f"data-{number}"})
            for number, source in enumerate(self.sources, start=1)
        ]


class RolloutConfig(Section):
    """How responses are sampled."""

    samples_per_prompt: int = Field(8, ge=1, description="samples in a group")
    max_new_tokens: int = Field(256, ge=1, description="longest response")
    temperature: float = Field(1.0, gt=0, description="of sampling; the trainer uses it too")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: all tokens")
    min_p: float = Field(0.0, ge=0, lt=1)
    stop: list[str] = Field([], description="strings that end a response")
    stop_token_ids: list[int] = Field([], description="end tokens beside the model's own")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="of the engine; float32 on a CPU gives the trainer's own log-probs"
    )
    prompts_per_shard: int = Field(8, ge=1, description="groups in one shard")
    engine: Literal["vllm", "hf"] = Field(
        "vllm", description="what generates; hf: plain transformers, slow, for checking"
    )
    deterministic: bool = Field(
        False,
        description="each shard is sampled as a batch of its own, so that its bytes don't depend "
        "on what else is sampled; slower where shards are small",
    )
    max_rounds: int = Field(
        1,
        ge=1,
        description="times an iteration samples at most, until data.batch_size groups have rewards "
        "that differ; 1: once, whatever they are",
    )
    oversample: float = Field(
        1.0, ge=1, description="prompts that a round draws for each one that is missing"
    )
    max_sequences: int = execution(256, ge=1, description="samples in flight in one engine")
    gpu_memory: float = execution(0.45, gt=0, lt=1, description="share of a GPU for one engine")

    @property
    def fills_batch(self) -> bool:
        """Whether an update takes groups whose rewards differ alone, and rounds look for them."""
        return self.max_rounds > 1 or self.oversample > 1

    def sampling_identity(self) -> dict[str, Any]:
        """The fields that change the samples of a round, whichever round it is."""
        how_many = ("max_rounds", "oversample")
        return {name: v for name, v in self.identity().items() if name not in how_many}

    def given_identity(self) -> dict[str, Any]:
        """The fields that change the samples of a round where the data holds the responses."""
        names = ("samples_per_prompt", "max_new_tokens", "prompts_per_shard")
        return {name: getattr(self, name) for name in names}
