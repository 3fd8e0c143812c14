"""What every engine is: token ids in, sampled token ids and their log-probabilities out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from stages.rollout.config import RolloutConfig


@dataclass(frozen=True)
class Request:
    """One sample to draw. ``prompt_ids`` go to the engine as they are."""

    prompt_ids: Sequence[int]
    seed: int


@dataclass(frozen=True)
class Sampled:
    """What was drawn: ``response_ids`` (T,), ``logprobs`` (T,) natural log, float32.

    ``logprobs`` are of the distribution that was sampled from: after temperature and cuts.
    ``finish_reason`` is ``stop`` (an end token or string, which is kept) or ``length``.
    """

    response_ids: list[int]
    logprobs: np.ndarray
    finish_reason: str
    text: str


class Engine(Protocol):
    """A warm engine over one Hugging Face folder."""

    def load(self, weights: Mapping[str, Any]) -> None:
        """Take new weights: Hugging Face parameter names to arrays (``stages/arrays.py``).

        A tied output head is not among them.
        """

    def forget(self) -> None:
        """Keep nothing of earlier prompts: a cached prefix is computed in another batch."""

    def sample(
        self, requests: Sequence[Request], sampling: RolloutConfig | None = None
    ) -> Iterator[tuple[int, Sampled]]:
        """Draw all ``requests``; yields (index, sample) as each ends.

        Args:
            sampling: how, where that is not as the engine was made: its temperature, cuts, stops
                and longest response count, and nothing else.
        """


def make_engine(model: str, config: RolloutConfig, context: int) -> Engine:
    """The engine that ``config`` names, over the folder ``model``."""
    if config.engine == "hf":
        from stages.rollout.hf_engine import HfEngine

        return HfEngine(model, config)
    from stages.rollout.vllm_engine import VllmEngine

    return VllmEngine(model, config, context)
