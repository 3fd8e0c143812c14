"""Log-probabilities of sampled tokens under the reference model, packed, without gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stages.logprobs import LogprobModel
from stages.models import device_of_this_process, load_causal_lm
from stages.packed import pack
from stages.packing import plan_microbatches
from stages.score.worker import ReferenceSpec


class Reference:
    """A frozen model, loaded once."""

    def __init__(self, spec: ReferenceSpec) -> None:
        self._spec = spec
        self._device = device_of_this_process()
        dtype = getattr(torch, spec.dtype)
        self._model = LogprobModel(load_causal_lm(spec.model, dtype)).to(self._device).eval()

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Mapping[str, Any]]) -> list[np.ndarray]:
        """(T,) float32 natural log for each row's response, at the sampling temperature."""
        sequences = [(row["prompt_ids"], row["response_ids"]) for row in rows]
        lengths = [len(prompt) + len(response) for prompt, response in sequences]
        result: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
        for microbatch in plan_microbatches(lengths, self._spec.max_tokens, 1)[0]:
            batch = pack([sequences[i] for i in microbatch], self._device)
            logprobs_N, _ = self._model(batch, self._spec.temperature)
            parts = logprobs_N.cpu().split([len(sequences[i][1]) for i in microbatch])
            for i, part in zip(microbatch, parts, strict=True):
                result[i] = part.numpy()
        return result
