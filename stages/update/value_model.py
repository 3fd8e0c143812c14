"""A critic's forward: what the states before given tokens are worth.

Shapes: N response tokens of a row, n of them this rank's, E model width.
"""

from typing import Any

import torch

from stages.packed import Packed, segments_of


class ValueModel(torch.nn.Module):
    """A decoder with a head of one output (``stages.models.load_value_model``)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Packed) -> torch.Tensor:
        """(N,) float32, with a gradient: the value of the state before each response token.

        That state is the prompt and the response so far, so it is read where the token's own
        log-prob is. No dropout that a classifier may have before its head: a value is no sample.
        """
        with segments_of(batch):
            hidden = self.model.base_model(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
            ).last_hidden_state[0]
        hidden_nE = hidden.index_select(0, batch.sources_n).float()
        head = self.model.score
        # Not rounded to half precision on the way out, as a return is to be told from the next.
        values_n = hidden_nE @ head.weight[0].float()
        return batch.whole(values_n if head.bias is None else values_n + head.bias.float())
