"""The data set as tokens, made once a run."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import pyarrow as pa

from artifacts import schemas
from artifacts.manifests import Shard
from artifacts.runs import prompts_folder
from artifacts.shards import read_shards, write_shard
from artifacts.store import Store
from stages.contract import Committed, Product, Work, find_or_make
from stages.rollout.config import DataConfig, DataSource
from stages.rollout.rows import Row, read_rows
from stages.rollout.selection import Selected

VERSION = 1
_ROWS_PER_SHARD = 8192


class PromptWork(Work):
    """The prompts stage belongs to the run, not to an iteration."""

    @property
    def folder(self) -> str:
        return prompts_folder(self.key)


def prompt_work(data: DataConfig, data_digest: str, tokenizer_digest: str, limit: int) -> Work:
    """The description of tokenising a data set. ``limit``: longest prompt, in tokens."""
    identity = {
        "columns": [[source.name, source.prompt, source.answer] for source in data.all_sources],
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
    shards: list[Shard] = []
    records: list[dict[str, Any]] = []
    kept, skipped = [], []
    for source in data.all_sources:
        rows = list(_encoded(tokenizer, source, data, int(work.identity["limit"])))
        fitting = [record for record in rows if record is not None]
        kept.append(len(fitting))
        skipped.append(len(rows) - len(fitting))
        if not fitting:
            raise ValueError(
                f"{source.path} gives no prompt of at most {work.identity['limit']} tokens: "
                "nothing to do"
            )
        records += fitting
        while len(records) >= _ROWS_PER_SHARD:
            shards.append(_flush(store, work.folder, len(shards), records[:_ROWS_PER_SHARD]))
            del records[:_ROWS_PER_SHARD]
    if records:
        shards.append(_flush(store, work.folder, len(shards), records))
    return Product(shards, outcome={"rows": kept, "skipped": skipped})


def _encoded(
    tokenizer: Any, source: DataSource, data: DataConfig, limit: int
) -> Iterator[dict[str, Any] | None]:
    """A record for each row of ``source``; None for one over the limit that is to be skipped."""
    for row in read_rows(source, data.template):
        text, token_ids = encode_prompt(tokenizer, row, data.template)
        if len(token_ids) <= limit:
            yield _record(source, row, text, token_ids)
        elif data.overlong == "skip":
            yield None
        else:
            raise ValueError(
                f"{row.place}: the prompt has {len(token_ids)} tokens, and the limit is "
                f"{limit}: shorten it, raise data.max_prompt_tokens, or set data.overlong=skip"
            )


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


def _record(source: DataSource, row: Row, text: str, token_ids: list[int]) -> dict[str, Any]:
    return {
        "prompt_id": row.digest,
        "source": source.name,
        "row": row.number,
        "token_ids": token_ids,
        "text": text,
        "ground_truth": row.answer,
        "extra": json.dumps(row.extra, sort_keys=True, ensure_ascii=False),
    }


def _flush(store: Store, folder: str, index: int, records: list[dict[str, Any]]) -> Shard:
    table = pa.Table.from_pylist(records, schema=schemas.PROMPTS)
    return write_shard(store, folder, index, table)


class PromptSet:
    """The committed prompts, read when one is first taken.

    ``num_rows`` is those of each source, which lie one after another.
    """

    def __init__(self, store: Store, prompts: Committed) -> None:
        self.ref = prompts.ref
        self.num_rows: list[int] = list(prompts.manifest.outcome["rows"])
        self._store, self._prompts = store, prompts

    def take(self, rows: Sequence[Selected]) -> Iterator[dict[str, Any]]:
        """The prompts of these rows, as records."""
        starts = [0, *accumulate(self.num_rows)]
        places = [starts[selected.source] + selected.row for selected in rows]
        return iter(self._table.take(pa.array(places, pa.int64())).to_pylist())

    @cached_property
    def _table(self) -> pa.Table:
        shards = read_shards(self._store, self._prompts.folder, self._prompts.manifest.shards)
        return pa.concat_tables(shards)
