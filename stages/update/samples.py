"""An iteration's samples as the update reads them: rollouts joined with scores and advantages."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import IntegrityError
from artifacts.manifests import Manifest, Ref, read_manifest
from artifacts.rounds import inputs_to_rounds
from artifacts.shards import read_table
from artifacts.store import Store
from stages.groups import group_indices
from stages.update.advantages import Scored, compute_advantages
from stages.update.batch import Component
from stages.update.config import UpdateConfig

# What the update reads of a rollout: the texts in it are for rewards and people.
_USED = {
    "sample_id",
    "group_id",
    "prompt_ids",
    "response_ids",
    "logprobs",
    "loss_mask",
    "finish_reason",
    "policy_digest",
}


@dataclass(frozen=True)
class Samples:
    """S samples. Ragged columns are lists of arrays, one entry a response token.

    Attributes:
        sampler_logprobs: None where nothing was sampled, but given by the data.
        rewards_S: float64, all of the reward, penalties too; NaN where it was dropped.
        max_new_tokens: longest response that the rollout allowed.
        weights_S: 1 where the sample enters the step's counts, else 0.
        chosen_S: whether the sample's group is one of the batch; steps share out those.
        advantages: float64, 0 where there is nothing to learn.
        values: float64, the critic's when it scored; None without one.
        returns: float64, what the critic learns; None without one.
        reward_kl: the KL in the reward, nats a sample; None where there is none.
        metrics: of rewards and advantages, for people.
    """

    ids: list[str]
    groups: list[str]
    sequences: list[tuple[list[int], list[int]]]
    loss_masks: list[np.ndarray]
    sampler_logprobs: list[np.ndarray] | None
    reference_logprobs: list[np.ndarray] | None
    rewards_S: np.ndarray
    max_new_tokens: int
    weights_S: np.ndarray
    chosen_S: np.ndarray
    advantages: list[np.ndarray]
    values: list[np.ndarray] | None = None
    returns: list[np.ndarray] | None = None
    reward_kl: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def lengths(self) -> list[int]:
        """Tokens of prompt and response together."""
        return [len(prompt) + len(response) for prompt, response in self.sequences]


def read_samples(
    store: Store,
    inputs: Mapping[str, Ref],
    config: UpdateConfig,
    on_null: str,
    wanted: int | None = None,
) -> Samples:
    """Read and join an update's committed inputs, round by round.

    Args:
        inputs: as the update's manifest names them; see :mod:`artifacts.rounds`.
        wanted: groups that make up the batch, as in :func:`compute_advantages`.

    Raises:
        IntegrityError: rollouts and scores don't hold the same samples, a column doesn't fit
            another, or samples were drawn with another policy than the one that is updated.
        StageError: no advantages can be made of them.
    """
    policy = _weights_digest(store, inputs["policy"])
    read = [_read_round(store, *refs, policy) for refs in inputs_to_rounds(inputs)]
    rolled = pa.concat_tables(part.rolled for part in read)
    scored = _scored(rolled, pa.concat_tables(part.scores for part in read), read[0])
    made = compute_advantages(scored, config, on_null, wanted)
    counts = {} if wanted is None else {"update/rounds": float(len(read))}
    return Samples(
        ids=rolled["sample_id"].to_pylist(),
        groups=list(scored.groups),
        sequences=list(
            zip(rolled["prompt_ids"].to_pylist(), rolled["response_ids"].to_pylist(), strict=True)
        ),
        loss_masks=list(scored.masks),
        sampler_logprobs=(
            None if scored.sampler_logprobs is None else list(scored.sampler_logprobs)
        ),
        reference_logprobs=(
            None if scored.reference_logprobs is None else list(scored.reference_logprobs)
        ),
        rewards_S=made.rewards_S,
        max_new_tokens=scored.max_new_tokens,
        weights_S=made.weights_S,
        chosen_S=made.chosen_S,
        advantages=made.advantages,
        values=None if scored.values is None else list(scored.values),
        returns=made.returns,
        reward_kl=made.reward_kl,
        metrics={**made.metrics, **counts},
    )


def split_minibatches(
    groups: Sequence[str], count: int, chosen_S: np.ndarray | None = None
) -> list[list[int]]:
    """Sample indices of each optimizer step: whole groups, in order, as even as they go.

    Args:
        chosen_S: whether each sample's group is one of the batch, to be shared out; None: all are.
    """
    members = [m for m in group_indices(groups) if chosen_S is None or chosen_S[m[0]]]
    return [
        [
            int(i)
            for indices in members[n * len(members) // count : (n + 1) * len(members) // count]
            for i in indices
        ]
        for n in range(count)
    ]


@dataclass(frozen=True)
class _Round:
    """A round as it was read: its samples and their scores, in the same order."""

    rolled: pa.Table
    scores: pa.Table
    max_new_tokens: int
    rewards: Sequence[Mapping[str, Any]]


def _read_round(store: Store, rollout: Ref, scores: Ref, policy: str) -> _Round:
    rolled, rollout_manifest = _read(store, rollout, _USED)
    table, scores_manifest = _read(store, scores)
    if rolled["sample_id"] != table["sample_id"]:
        raise IntegrityError(scores.path, "the rollout's samples", "others", "sample ids")
    _check_policy(rollout.path, rolled, policy if "policy" in rollout_manifest.inputs else None)
    _check_lengths(rollout.path, rolled, rolled, ("logprobs", "loss_mask"))
    _check_lengths(scores.path, rolled, table, ("reference_logprobs", "token_rewards", "values"))
    _check_finite(scores.path, table)
    identity, rewards = rollout_manifest.identity, scores_manifest.identity["rewards"]
    return _Round(rolled, table, identity["max_new_tokens"], rewards)


def _weights_digest(store: Store, policy: Ref) -> str:
    """Digest of the weights that an update's input ``policy`` stands for."""
    if policy.path == "model":
        return policy.digest
    return str(read_manifest(store, policy.path, policy.digest).outcome["weights_digest"])


def _check_policy(path: str, rolled: pa.Table, policy: str | None) -> None:
    """Refuse samples of an engine that held other weights than those that are to be updated.

    ``policy`` is None where the data gave the responses: no engine has known their log-probs.
    """
    unknown, expected = rolled["logprobs"].null_count, rolled.num_rows if policy is None else 0
    if unknown != expected:
        raise IntegrityError(path, expected, unknown, "samples without log-probs")
    for digest in pc.unique(rolled["policy_digest"]).to_pylist():
        if digest != policy:
            raise IntegrityError(path, policy, digest, "policy digest of its samples")


def _scored(rolled: pa.Table, table: pa.Table, first: _Round) -> Scored:
    reference = table["reference_logprobs"]
    masks = _arrays(rolled["loss_mask"])
    return Scored(
        groups=rolled["group_id"].to_pylist(),
        rewards_S=_floats(table["reward"]),
        components=[
            Component(spec["column"], spec["weight"], _floats(table[f"reward.{spec['column']}"]))
            for spec in first.rewards
            # What is given per token comes with `token_rewards`, and what weighs 0 with nothing.
            if not spec.get("per_token") and spec["weight"] != 0
        ],
        token_rewards=_token_rewards(table, masks),
        masks=masks,
        sampler_logprobs=_sampler_logprobs(rolled),
        reference_logprobs=None if reference.null_count else _arrays(reference),
        was_truncated_S=pc.equal(rolled["finish_reason"], "length").to_numpy(),
        max_new_tokens=first.max_new_tokens,
        values=_values(table),
    )


def _sampler_logprobs(rolled: pa.Table) -> list[np.ndarray] | None:
    return None if rolled["logprobs"].null_count else _arrays(rolled["logprobs"])


def _values(table: pa.Table) -> list[np.ndarray] | None:
    # Scores of an earlier version don't have the column.
    if "values" not in table.column_names or table["values"].null_count:
        return None
    return [values.astype(np.float64) for values in _arrays(table["values"])]


def _token_rewards(table: pa.Table, masks: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """Token rewards, with 0 where a sample has none; None where no sample has any."""
    # Scores of an earlier version don't have the column.
    if "token_rewards" not in table.column_names:
        return None
    column = table["token_rewards"]
    if column.null_count == len(column):
        return None
    return [
        np.asarray(value.values, dtype=np.float64) if value.is_valid else np.zeros(len(mask))
        for value, mask in zip(column, masks, strict=True)
    ]


def _read(
    store: Store, ref: Ref, columns: Collection[str] | None = None
) -> tuple[pa.Table, Manifest]:
    manifest = read_manifest(store, ref.path, ref.digest)
    return read_table(store, ref.path, manifest, columns), manifest


def _arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    return [np.asarray(value.values) for value in column]


def _floats(column: pa.ChunkedArray) -> np.ndarray:
    """float64, NaN for null."""
    values: np.ndarray = column.to_numpy().astype(np.float64)
    return values


def _check_lengths(path: str, rolled: pa.Table, table: pa.Table, names: Sequence[str]) -> None:
    """Refuse a column whose lists, where they are not null, don't fit the responses."""
    tokens: Any = pc.list_value_length(rolled["response_ids"])
    for name in names:
        if name not in table.column_names:
            continue
        lengths = pc.list_value_length(table[name])
        if not pc.all(pc.equal(lengths, tokens), min_count=0).as_py():
            raise IntegrityError(path, "one entry a response token", "another count", name)


def _check_finite(path: str, table: pa.Table) -> None:
    """Refuse rewards and values that are NaN or infinite: only null stands for none."""
    for name in table.column_names:
        column = table[name]
        if name in ("token_rewards", "values"):
            column = pc.list_flatten(column)
        elif not name.startswith("reward"):
            continue
        if not pc.all(pc.is_finite(column), min_count=0).as_py():
            raise IntegrityError(path, "finite numbers or null", "NaN or an infinity", name)
