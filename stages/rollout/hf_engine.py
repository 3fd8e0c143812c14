"""Plain transformers as the engine: one sample at a time, slow, and easy to believe.

For checking, and where vLLM doesn't run. A sample depends on its prompt, its seed and the weights
alone: nothing is batched or padded. V is the vocabulary's size.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation import logits_process as cuts

from stages.arrays import tensor_of
from stages.models import device_of_this_process
from stages.rollout.config import RolloutConfig
from stages.rollout.engine import Request, Sampled


class HfEngine:
    """See :class:`stages.rollout.engine.Engine`."""

    def __init__(self, model: str, config: RolloutConfig) -> None:
        self._config = config
        self._device = device_of_this_process()
        transformers.utils.logging.disable_progress_bar()
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, config.dtype)
        )
        self._model = loaded.to(self._device).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        self._ends = _end_tokens(model, self._tokenizer)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Any]) -> None:
        parameters = dict(self._model.named_parameters())
        if parameters.keys() != weights.keys():
            odd = sorted(parameters.keys() ^ weights.keys())
            raise ValueError(f"the weights differ from the model's in {len(odd)} names: {odd[:3]}")
        for name, packed in weights.items():
            parameters[name].copy_(tensor_of(packed))

    def forget(self) -> None:
        """There is nothing to forget: every sample begins anew."""

    def sample(
        self, requests: Sequence[Request], sampling: RolloutConfig | None = None
    ) -> Iterator[tuple[int, Sampled]]:
        for index, request in enumerate(requests):
            yield index, self._draw(request, sampling or self._config)

    @torch.no_grad()
    def _draw(self, request: Request, config: RolloutConfig) -> Sampled:
        ends, cutting = self._ends | set(config.stop_token_ids), _cuts(config)
        generator = torch.Generator(self._device).manual_seed(request.seed)
        ids: list[int] = []
        logprobs: list[float] = []
        text, cache = "", None
        new = list(request.prompt_ids)
        while len(ids) < config.max_new_tokens:
            step = torch.tensor([new], device=self._device)
            output = self._model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            logprobs_V = _processed(output.logits[0, -1:], cutting)
            token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(logprobs_V[token]))
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            if token in ends:
                return Sampled(ids, np.array(logprobs, np.float32), "stop", text)
            if found := [text.index(stop) for stop in config.stop if stop in text]:
                return Sampled(ids, np.array(logprobs, np.float32), "stop", text[: min(found)])
            new = [token]
        return Sampled(ids, np.array(logprobs, np.float32), "length", text)


def _processed(logits_1V: torch.Tensor, cutting: Sequence[Any]) -> torch.Tensor:
    """Log-probabilities (V,) of the distribution that is sampled from; float32."""
    scores_1V = logits_1V.float()
    for cut in cutting:
        scores_1V = cut(None, scores_1V)
    return scores_1V[0].log_softmax(-1)


def _cuts(config: RolloutConfig) -> list[Any]:
    found: list[Any] = [cuts.TemperatureLogitsWarper(config.temperature)]
    if config.min_p > 0:
        found.append(cuts.MinPLogitsWarper(config.min_p))
    if config.top_k > 0:
        found.append(cuts.TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        found.append(cuts.TopPLogitsWarper(config.top_p))
    return found


def _end_tokens(model: str, tokenizer: Any) -> set[int]:
    """The tokenizer's end token and those of the model's generation settings, as vLLM has it."""
    ends = {tokenizer.eos_token_id}
    try:
        named = transformers.GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # the folder has none
        named = None
    ends |= set(named) if isinstance(named, list) else {named}
    return {token for token in ends if token is not None}
