"""The score actor: reads a rollout shard, has the rewards called, writes the score shard.

It alone holds the store; rewards run in processes of their own, which get rows and give numbers.
"""

import logging
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.manifests import Shard
from artifacts.schemas import is_usage, scores_schema, usage_columns
from artifacts.shards import read_shard, write_shard
from artifacts.store import Store
from stages.score.components import Scored, combine
from stages.score.config import AnyReward, RewardSpec, judges
from stages.score.judge_spec import JudgeSpec
from stages.score.order import Finished, InHand, ShardOrder, places_to_score, read_earlier
from stages.score.outcomes import Outcome
from stages.score.preference import COLUMN, preferred
from stages.score.reward_here import RewardHere
from stages.score.reward_model_spec import RewardModelSpec
from stages.score.reward_process import RewardProcess
from stages.score.rewards import reward_arguments
from stages.score.tokens import token_texts

log = logging.getLogger("ratchet")

_SAMPLE_COLUMNS = ("sample_id", "group_id", "sample_index")
_TEXT_COLUMNS = (
    "prompt_text",
    "messages",
    "text",
    "ground_truth",
    "finish_reason",
    "source",
    "extra",
)
# Long, and worth their making where somebody reads them only.
_TOKEN_COLUMNS = ("prompt_ids", "response_ids")
_READ_COLUMNS = (*_SAMPLE_COLUMNS, *_TEXT_COLUMNS, *_TOKEN_COLUMNS)


@dataclass(frozen=True)
class ReferenceSpec:
    """The reference model's pass: where it is, and how it computes."""

    model: str
    dtype: str
    temperature: float
    max_tokens: int


@dataclass(frozen=True)
class ScorerSpec:
    """All that a score worker is made of.

    Attributes:
        rewards: what to call; none where the samples are pairs, whose verdict is known.
        model: folder of the policy's tokenizer, for rewards per token.
        workers: how many share out a reward's rate of calls.
        is_local: rewards run in the worker's own process.
        digests: of what rewards are made of, by column, as keys have them.
    """

    rewards: Sequence[AnyReward]
    reference: ReferenceSpec | None
    model: str
    workers: int
    is_local: bool
    digests: Mapping[str, str] = field(default_factory=dict)


class Scoring(Protocol):
    """A reward that can be asked, here or in a process of its own."""

    def score(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Outcome | None]]:
        """See ``RewardProcess.score``."""

    def close(self) -> None:
        """End it."""


class ScoreWorker:
    """Reward functions and, where one is asked for, the reference model."""

    def __init__(self, name: str, spec: ScorerSpec) -> None:
        self._name, self._spec = name, spec
        self._rewards = {
            reward.column: _scoring(reward, spec)
            for reward in spec.rewards
            if not isinstance(reward, RewardModelSpec)
        }
        self._needs_tokens = any(reward.per_token for reward in spec.rewards)
        functions = [reward for reward in spec.rewards if isinstance(reward, RewardSpec)]
        if spec.is_local and any(reward.timeout_seconds for reward in functions):
            log.info("rewards run in this process: score.rewards timeouts can't end a call")
        self._reference = None
        if spec.reference is not None:
            from stages.score.reference import Reference

            self._reference = Reference(spec.reference)

    def score(
        self, store: Store, source: str, folder: str, order: ShardOrder
    ) -> Iterator[InHand | Finished]:
        """Score a rollout shard of folder ``source`` into ``folder``."""
        start = time.time()
        rollouts = read_shard(store, source, order.rollout, _READ_COLUMNS)
        earlier = read_earlier(store, order)
        places = places_to_score(rollouts, earlier)
        table = yield from self._table(rollouts.take(places), order)
        if earlier is not None:
            table = merge_scores(earlier, table, places.to_pylist())
        shard = write_shard(store, folder, order.index, table)
        errors = table.num_rows - table["error"].null_count
        entry = self._entry(order, start, shard, len(places))
        yield Finished(order.index, shard, [*order.read, entry], errors)

    def close(self) -> None:
        """End the rewards' processes."""
        for reward in self._rewards.values():
            reward.close()

    def _table(self, rollouts: pa.Table, order: ShardOrder) -> Generator[InHand, None, pa.Table]:
        rows = self._rows(rollouts)
        names = [spec.column for spec in self._spec.rewards] or [COLUMN]
        outcomes = yield from self._outcomes(rows, order)
        scored = self._scored(rows, outcomes, order)
        columns: dict[str, list[Any]] = {
            **{name: [row[name] for row in rows] for name in ("sample_id", "group_id")},
            **{f"reward.{name}": [sample.components[name] for sample in scored] for name in names},
            "reward": [sample.reward for sample in scored],
            "error": [sample.error for sample in scored],
            "token_rewards": [sample.token_rewards for sample in scored],
            "reference_logprobs": self._reference_logprobs(rows),
            "values": [None] * len(rows) if order.values is None else list(order.values),
        }
        for number, spec in enumerate(self._spec.rewards):
            if isinstance(spec, JudgeSpec):
                columns |= _usage_columns(spec.column, [found[number] for found in outcomes])
        schema = scores_schema(names, [spec.column for spec in judges(self._spec.rewards)])
        return pa.Table.from_pydict(columns, schema=schema)

    def _scored(
        self,
        rows: Sequence[Mapping[str, Any]],
        outcomes: Sequence[Sequence[Outcome]],
        order: ShardOrder,
    ) -> list[Scored]:
        specs = self._spec.rewards
        if not specs:
            return [preferred(row["sample_index"]) for row in rows]
        return [
            combine(specs, found, row["sample_id"], order.index)
            for row, found in zip(rows, outcomes, strict=True)
        ]

    def _rows(self, rollouts: pa.Table) -> list[dict[str, Any]]:
        needs_ids = self._needs_tokens or self._reference is not None
        names = [*_SAMPLE_COLUMNS, *_TEXT_COLUMNS, *(_TOKEN_COLUMNS if needs_ids else [])]
        lengths = pc.list_value_length(rollouts["response_ids"])
        # Rollouts of plain text may have no column of messages.
        known = [name for name in names if name in rollouts.column_names]
        rows: list[dict[str, Any]] = (
            rollouts.select(known).append_column("num_tokens", lengths).to_pylist()
        )
        return rows

    def _outcomes(
        self, rows: Sequence[Mapping[str, Any]], order: ShardOrder
    ) -> Generator[InHand, None, list[list[Outcome]]]:
        """An outcome for each row and reward; on the way, what is in hand where that matters."""
        arguments = [self._arguments(row) for row in rows]
        outcomes: list[list[Outcome]] = [[] for _ in rows]
        for spec in self._spec.rewards:
            if isinstance(spec, RewardModelSpec):
                for place, rated in enumerate(order.rated[spec.column]):
                    outcomes[place].append(rated)
                continue
            reward, given = self._rewards[spec.column], rows
            if isinstance(spec, RewardSpec):
                given = arguments
            for part in _parts(len(rows), order.attempt, spec):
                if order.attempt > 1 and part:
                    yield InHand(order.index, _described(rows, part, spec))
                found = dict(reward.score([given[place] for place in part]))
                for number, place in enumerate(part):
                    outcome = found[number]
                    assert outcome is not None
                    outcomes[place].append(outcome)
        return outcomes

    def _reference_logprobs(self, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        if self._reference is None or not rows:
            return [None] * len(rows)
        return list(self._reference.logprobs(rows))

    def _arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        arguments = reward_arguments(row)
        if self._needs_tokens:
            arguments["tokens"] = token_texts(self._spec.model, row["response_ids"])
        return arguments

    def _entry(self, order: ShardOrder, start: float, shard: Shard, rows: int) -> dict[str, Any]:
        return {
            "unit": f"shard-{order.index:05d}",
            "worker": f"{self._name}:{os.getpid()}",
            "attempt": order.attempt,
            "start": start,
            "seconds": time.time() - start,
            "rows": rows,
            "tokens": 0,
            "bytes": shard.bytes,
        }


def merge_scores(earlier: pa.Table, again: pa.Table, places: Sequence[int]) -> pa.Table:
    """``earlier`` with the rows at ``places`` replaced by those of ``again``, in order.

    But for values, which no reward changes, and the tokens of judges, which add up.
    """
    rows = earlier.to_pylist()
    for place, row in zip(places, again.to_pylist(), strict=True):
        before = rows[place]
        tokens = {name: _sum(before[name], row[name]) for name in row if is_usage(name)}
        rows[place] = {**row, "values": before.get("values"), **tokens}
    return pa.Table.from_pylist(rows, schema=again.schema)


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one + (other or 0)


def _usage_columns(judge: str, outcomes: Sequence[Outcome]) -> dict[str, list[int | None]]:
    usages = [outcome.usage or (None, None) for outcome in outcomes]
    names = usage_columns(judge)
    return {name: [usage[n] for usage in usages] for n, name in enumerate(names)}


def _scoring(reward: RewardSpec | JudgeSpec, spec: ScorerSpec) -> Scoring:
    if isinstance(reward, JudgeSpec):
        from stages.score.judge import Judge

        return Judge(reward, spec.workers)
    if spec.is_local:
        return RewardHere(reward)
    if reward.calls_per_second is not None:
        share = reward.calls_per_second / spec.workers
        reward = reward.model_copy(update={"calls_per_second": share})
    return RewardProcess(reward)


def _parts(count: int, attempt: int, spec: AnyReward) -> list[range]:
    """Places to score together: all; after a worker's death one by one, so that one is known."""
    if attempt == 1 or spec.batched:
        return [range(count)]
    return [range(place, place + 1) for place in range(count)]


def _described(rows: Sequence[Mapping[str, Any]], part: range, spec: AnyReward) -> str:
    row = rows[part.start]
    and_more = f" and {len(part) - 1} more" if len(part) > 1 else ""
    return (
        f"{row['sample_id']}{and_more} (reward {spec.column}, prompt of {len(row['prompt_text'])} "
        f"characters, response of {row['num_tokens']} tokens)"
    )
