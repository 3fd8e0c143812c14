"""The data set as tokens, made once a run, and which of its rows an iteration takes.

There is no cursor: an iteration's rows are a pure function of the data, the seed and the position
at which the iteration before it ended. Position p is row ``order(epoch)[p % rows]`` of epoch
``p // rows``.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from artifacts import schemas
from artifacts.keys import key_of
from artifacts.manifests import Shard
from artifacts.runs import prompts_folder
from artifacts.shards import read_shards, write_shard
from artifacts.store import Store
from stages.contract import Committed, Product, Work, find_or_make
from stages.rollout.config import DataConfig
from stages.rollout.rows import Row, read_rows

VERSION = 1
_ROWS_PER_SHARD = 8192


@dataclass(frozen=True)
class Selected:
    """A prompt row chosen for an iteration."""

    epoch: int
    row: int


class PromptWork(Work):
    """The prompts stage belongs to the run, not to an iteration."""

    @property
    def folder(self) -> str:
        return prompts_folder(self.key)


def select(num_rows: int, seed: int, start: int, count: int, shuffle: bool) -> list[Selected]:
    """Rows at positions ``start`` to ``start + count``, going round the epochs.

    Each epoch takes every row once. With ``shuffle`` its order is drawn from (seed, epoch).
    """
    if num_rows < 1:
        raise ValueError("the data set has no rows to select from")
    chosen = []
    for position in range(start, start + count):
        epoch, offset = divmod(position, num_rows)
        row = int(_order(num_rows, seed, epoch)[offset]) if shuffle else offset
        chosen.append(Selected(epoch, row))
    return chosen


@lru_cache(maxsize=4)
def _order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    # RandomState's streams are frozen for ever; those of numpy's newer Generator are not.
    state = np.random.RandomState(int(key_of({"seed": seed, "epoch": epoch})[:8], 16))
    return state.permutation(num_rows)


def prompt_work(data: DataConfig, data_digest: str, tokenizer_digest: str, limit: int) -> Work:
    """The description of tokenising a data set. ``limit``: longest prompt, in tokens."""
    identity = {
        "prompt": data.prompt,
        "answer": data.answer,
        "template": data.template,
        "overlong": data.overlong,
        "limit": limit,
        "data": data_digest,
        "tokenizer": tokenizer_digest,
    }
    return PromptWork("prompts", "prompts", VERSION, 0, identity, {})


def prepare(store: Store, work: Work, data: DataConfig, model: str) -> Committed:
    """Render and tokenise ``data`` with the tokenizer of ``model``, once.

    Raises:
        ValueError: a row is unusable; the message names file and line.
    """
    return find_or_make(store, work, lambda: _tokenise(store, work, data, model))


def _tokenise(store: Store, work: Work, data: DataConfig, model: str) -> Product:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    limit = int(work.identity["limit"])
    shards: list[Shard] = []
    records: list[dict[str, Any]] = []
    num_skipped = 0
    for row in read_rows(data):
        text, token_ids = encode_prompt(tokenizer, row, data.template)
        if len(token_ids) > limit:
            if data.overlong == "fail":
                raise ValueError(
                    f"{row.place}: the prompt has {len(token_ids)} tokens, and the limit is "
                    f"{limit}: shorten it, raise data.max_prompt_tokens, or set data.overlong=skip"
                )
            num_skipped += 1
            continue
        records.append(_record(row, text, token_ids))
        if len(records) == _ROWS_PER_SHARD:
            shards.append(_flush(store, work.folder, len(shards), records))
    if records:
        shards.append(_flush(store, work.folder, len(shards), records))
    if not shards:
        raise ValueError(f"{data.path} gives no prompt of at most {limit} tokens: nothing to do")
    rows = sum(shard.rows for shard in shards)
    return Product(shards, outcome={"rows": rows, "skipped": num_skipped})


def encode_prompt(tokenizer: Any, row: Row, template: str) -> tuple[str, list[int]]:
    """Text and token ids of a prompt.

    A chat template writes the begin token itself, so its text is encoded without special
    tokens; plain text gets those that the tokenizer adds. Either way there is one.
    """
    if template == "plain":
        text = str(row.prompt)
        return text, list(tokenizer(text)["input_ids"])
    messages = row.prompt
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _record(row: Row, text: str, token_ids: list[int]) -> dict[str, Any]:
    return {
        "prompt_id": row.digest,
        "row": row.number,
        "token_ids": token_ids,
        "text": text,
        "ground_truth": row.answer,
        "extra": json.dumps(row.extra, sort_keys=True, ensure_ascii=False),
    }


def _flush(store: Store, folder: str, index: int, records: list[dict[str, Any]]) -> Shard:
    table = pa.Table.from_pylist(records, schema=schemas.PROMPTS)
    records.clear()
    return write_shard(store, folder, index, table)


class PromptSet:
    """The committed prompts, read once."""

    def __init__(self, store: Store, prompts: Committed) -> None:
        self.ref = prompts.ref
        self._table = pa.concat_tables(read_shards(store, prompts.folder, prompts.manifest))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def take(self, rows: list[int]) -> Iterator[dict[str, Any]]:
        """The prompts at these places, as records."""
        return iter(self._table.take(pa.array(rows, pa.int64())).to_pylist())
