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
        """(logprobs_N, entropy_N): natural logs, float32, both with a gradient.

        Where ranks share the row, each computes those of its own slice, and all get all of them.
        """
        with segments_of(batch):
            hidden = self.model.base_model(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
            ).last_hidden_state[0]
        weight = self.model.get_output_embeddings().weight
        hidden_nE = hidden.index_select(0, batch.sources_n)
        logprobs_n, entropy_n = TokenLogprobs.apply(hidden_nE, weight, batch.targets_n, temperature)
        return batch.whole(logprobs_n), batch.whole(entropy_n)


class TokenLogprobs(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature)[target], and the entropy, chunk by chunk.

    Logits and softmax are float32 whatever the inputs' type: rounded to bfloat16, a logit of 20
    is off by up to 0.06. Backward makes each chunk's logits again:
    d logits = ((onehot - p) d logprob - p (log p + entropy) d entropy) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        weight_VE: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = Head(weight_VE, temperature)
        logprobs, entropies, normalizers = [], [], []
        for start in range(0, len(targets_N), CHUNK):
            logits_CV = head.logits(hidden_NE[start : start + CHUNK])
            normalizer_C = logits_CV.logsumexp(-1)
            target_C = targets_N[start : start + CHUNK, None]
            logprobs.append(logits_CV.gather(-1, target_C)[:, 0] - normalizer_C)
            p_CV = (logits_CV - normalizer_C[:, None]).exp_()
            entropies.append(normalizer_C - torch.einsum("cv,cv->c", p_CV, logits_CV))
            normalizers.append(normalizer_C)
        empty = hidden_NE.new_zeros(0, dtype=torch.float32)
        normalizer_N = torch.cat([empty, *normalizers])
        entropy_N = torch.cat([empty, *entropies])
        ctx.save_for_backward(hidden_NE, weight_VE, targets_N, normalizer_N, entropy_N)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return torch.cat([empty, *logprobs]), entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_NE, weight_VE, targets_N, normalizer_N, entropy_N = ctx.saved_tensors
        head = Head(weight_VE, ctx.temperature)
        grad_hidden_NE = torch.zeros_like(hidden_NE)
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32)
        for start in range(0, len(targets_N), CHUNK):
            chunk = slice(start, start + CHUNK)
            logp_CV = head.logits(hidden_NE[chunk]).sub_(normalizer_N[chunk, None])
            d_logprob_C, d_entropy_C = (None if g is None else g[chunk, None] for g in grads)
            d_CV = _logits_gradient(
                logp_CV, targets_N[chunk, None], entropy_N[chunk, None], d_logprob_C, d_entropy_C
            )
            d_CV = d_CV.div_(ctx.temperature).to(hidden_NE.dtype)
            grad_hidden_NE[chunk] = d_CV @ weight_VE
            grad_weight_VE += d_CV.T @ hidden_NE[chunk]
        return grad_hidden_NE, grad_weight_VE.to(weight_VE.dtype), None, None


def _logits_gradient(
    logp_CV: torch.Tensor,
    target_C1: torch.Tensor,
    entropy_C1: torch.Tensor,
    d_logprob_C1: torch.Tensor | None,
    d_entropy_C1: torch.Tensor | None,
) -> torch.Tensor:
    """(C, V): what the gradients of log-prob and entropy come to. Writes over ``logp_CV``."""
    if d_entropy_C1 is None:
        assert d_logprob_C1 is not None
        d_CV = logp_CV.exp_().mul_(-d_logprob_C1)
    else:
        p_CV = logp_CV.exp()
        d_CV = logp_CV.add_(entropy_C1).mul_(p_CV).mul_(-d_entropy_C1)
        if d_logprob_C1 is None:
            return d_CV
        d_CV -= p_CV.mul_(d_logprob_C1)
    d_CV.scatter_(1, target_C1, d_CV.gather(1, target_C1) + d_logprob_C1)
    return d_CV


class Head:
    """The output head: hidden states to float32 logits at a temperature."""

    def __init__(self, weight_VE: torch.Tensor, temperature: float) -> None:
        # A GPU multiplies half precision into float32; a CPU takes float32 on both sides.
        is_half = weight_VE.dtype.itemsize < 4
        self._widens = is_half and weight_VE.is_cuda
        self._weight_VE = weight_VE.float() if is_half and not weight_VE.is_cuda else weight_VE
        self._temperature = temperature

    def logits(self, hidden_CE: torch.Tensor) -> torch.Tensor:
        """(C, V), float32, not rounded on the way."""
        if self._widens:
            product = torch.mm(hidden_CE, self._weight_VE.T, out_dtype=torch.float32)
        else:
            product = (hidden_CE.to(self._weight_VE.dtype) @ self._weight_VE.T).float()
        return product.div_(self._temperature)
