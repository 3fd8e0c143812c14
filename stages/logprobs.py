"""Log-probabilities of given tokens, without ever holding the logits of a whole row.

Shapes: N tokens asked for, C of them in a chunk, V vocabulary, E model width.
"""

from typing import Any

import torch

from stages.packed import Packed, segments_of

# Tokens whose logits exist at once: 1,024 x a vocabulary of 152k in float32 is 0.6 GB.
CHUNK = 1024


class LogprobModel(torch.nn.Module):
    """A causal language model whose forward gives log-probabilities instead of logits.

    A module of its own, so that FSDP's root hooks surround the output head as well.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Packed, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs_N, entropy_N): natural logs, float32; no gradient reaches the entropy."""
        with segments_of(batch):
            hidden = self.model.base_model(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
            ).last_hidden_state[0]
        weight = self.model.get_output_embeddings().weight
        hidden_NE = hidden.index_select(0, batch.sources_N)
        return TokenLogprobs.apply(hidden_NE, weight, batch.targets_N, temperature)


class TokenLogprobs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature)[target], and the entropy, chunk by chunk.

    The softmax is float32 whatever the product's type. Backward makes each chunk's logits
    again: d logits = (onehot - p) * d logprob / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        weight_VE: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies, normalizers = [], [], []
        for start in range(0, len(targets_N), CHUNK):
            logits_CV = _logits(hidden_NE[start : start + CHUNK], weight_VE, temperature)
            normalizer_C = logits_CV.logsumexp(-1)
            target_C = targets_N[start : start + CHUNK, None]
            logprobs.append(logits_CV.gather(-1, target_C)[:, 0] - normalizer_C)
            p_CV = (logits_CV - normalizer_C[:, None]).exp_()
            entropies.append(normalizer_C - torch.einsum("cv,cv->c", p_CV, logits_CV))
            normalizers.append(normalizer_C)
        empty = hidden_NE.new_zeros(0, dtype=torch.float32)
        normalizer_N = torch.cat([empty, *normalizers])
        ctx.save_for_backward(hidden_NE, weight_VE, targets_N, normalizer_N)
        ctx.temperature = temperature
        entropy_N = torch.cat([empty, *entropies])
        ctx.mark_non_differentiable(entropy_N)
        return torch.cat([empty, *logprobs]), entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NE, weight_VE, targets_N, normalizer_N = ctx.saved_tensors
        grad_hidden_NE = torch.zeros_like(hidden_NE)
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32)
        for start in range(0, len(targets_N), CHUNK):
            chunk = slice(start, start + CHUNK)
            logits_CV = _logits(hidden_NE[chunk], weight_VE, ctx.temperature)
            d_CV = (logits_CV - normalizer_N[chunk, None]).exp_().neg_()
            target_C = targets_N[chunk, None]
            d_CV.scatter_(1, target_C, d_CV.gather(1, target_C) + 1)
            d_CV *= grads[0][chunk, None] / ctx.temperature
            d_CV = d_CV.to(hidden_NE.dtype)
            grad_hidden_NE[chunk] = d_CV @ weight_VE
            grad_weight_VE += d_CV.T @ hidden_NE[chunk]
        return grad_hidden_NE, grad_weight_VE.to(weight_VE.dtype), None, None


def _logits(hidden_CE: torch.Tensor, weight_VE: torch.Tensor, temperature: float) -> torch.Tensor:
    return (hidden_CE @ weight_VE.T).float() / temperature
