"""An iteration's samples as the update reads them: rollouts joined with scores and advantages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from artifacts.errors import IntegrityError
from artifacts.manifests import Ref, read_manifest
from artifacts.shards import read_table
from artifacts.store import Store
from stages.update.advantages import ADVANTAGES, group_indices, sample_weights
from stages.update.config import UpdateConfig


@dataclass(frozen=True)
class Samples:
    """S samples. Ragged columns are lists of arrays, one entry a response token.

    Attributes:
        weights_S: 1 where the sample enters the step's counts, else 0.
        advantages_S: float64, 0 where there is nothing to learn.
    """

    ids: list[str]
    groups: list[str]
    sequences: list[tuple[list[int], list[int]]]
    loss_masks: list[np.ndarray]
    sampler_logprobs: list[np.ndarray]
    reference_logprobs: list[np.ndarray] | None
    weights_S: np.ndarray
    advantages_S: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def lengths(self) -> list[int]:
        """Tokens of prompt and response together."""
        return [len(prompt) + len(response) for prompt, response in self.sequences]


def read_samples(
    store: Store, rollout: Ref, scores: Ref, config: UpdateConfig, on_null: str
) -> Samples:
    """Read and join the two committed inputs of an update.

    Raises:
        IntegrityError: they don't hold the same samples, or a column doesn't fit another.
    """
    rolled = _read(store, rollout)
    scored = _read(store, scores)
    if rolled["sample_id"] != scored["sample_id"]:
        raise IntegrityError(scores.path, "the rollout's samples", "others", "sample ids")
    _check_lengths(rollout.path, rolled)
    groups: list[str] = rolled["group_id"].to_pylist()
    rewards_S = scored["reward"].to_numpy().astype(np.float64)
    advantages_S = ADVANTAGES[config.algorithm](groups, rewards_S)
    weights_S = sample_weights(groups, rewards_S, on_null)
    reference = scored["reference_logprobs"]
    return Samples(
        ids=rolled["sample_id"].to_pylist(),
        groups=groups,
        sequences=list(
            zip(rolled["prompt_ids"].to_pylist(), rolled["response_ids"].to_pylist(), strict=True)
        ),
        loss_masks=_arrays(rolled["loss_mask"]),
        sampler_logprobs=_arrays(rolled["logprobs"]),
        reference_logprobs=None if reference.null_count else _arrays(reference),
        weights_S=weights_S,
        advantages_S=advantages_S * weights_S,
    )


def split_minibatches(groups: Sequence[str], count: int) -> list[list[int]]:
    """Sample indices of each optimizer step: whole groups, in order, as even as they go."""
    members = group_indices(groups)
    return [
        [
            int(i)
            for indices in members[n * len(members) // count : (n + 1) * len(members) // count]
            for i in indices
        ]
        for n in range(count)
    ]


def _read(store: Store, ref: Ref) -> pa.Table:
    return read_table(store, ref.path, read_manifest(store, ref.path, ref.digest))


def _arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    return [np.asarray(value.values) for value in column]


def _check_lengths(path: str, rolled: pa.Table) -> None:
    import pyarrow.compute as pc

    tokens: Any = pc.list_value_length(rolled["response_ids"])
    for name in ("logprobs", "loss_mask"):
        if pc.list_value_length(rolled[name]) != tokens:
            raise IntegrityError(path, "one entry a response token", "another count", name)
