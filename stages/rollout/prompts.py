"""The data set as tokens, made once a run."""

import json
from collections.abc import Iterator, Mapping, Sequence
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
from stages.rollout.pairs import as_messages, encode_pair, text_of
from stages.rollout.rows import Row, read_rows
from stages.rollout.selection import Selected

VERSION = 1
_ROWS_PER_SHARD = 8192


class PromptWork(Work):
    """The prompts stage belongs to the run, not to an iteration."""

    @property
    def folder(self) -> str:
        return prompts_folder(self.key)


def prompt_work(
    data: DataConfig,
    data_digest: str,
    tokenizer_digest: str,
    limit: int,
    response_limit: int | None = None,
) -> Work:
    """The description of tokenising a data set.

    Args:
        limit: longest prompt, in tokens.
        response_limit: longest response, where the data holds responses.
    """
    identity: dict[str, Any] = {
        "columns": [[source.name, *source.columns] for source in data.all_sources],
        "template": data.template,
        "overlong": data.overlong,
        "limit": limit,
        "data": data_digest,
        "tokenizer": tokenizer_digest,
    }
    if data.template == "chat":
        identity["messages"] = True  # its rows hold them; plain text has none
    if data.has_pairs:
        identity["response_limit"] = response_limit
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
    schema = schemas.PAIRS if data.has_pairs else schemas.PROMPTS
    shards: list[Shard] = []
    records: list[dict[str, Any]] = []
    kept, skipped = [], []
    for source in data.all_sources:
        rows = list(_encoded(tokenizer, source, data, work.identity))
        fitting = [record for record in rows if record is not None]
        kept.append(len(fitting))
        skipped.append(len(rows) - len(fitting))
        if not fitting:
            raise ValueError(f"{source.path} gives no {_wanted(work.identity)}: nothing to do")
        records += fitting
        while len(records) >= _ROWS_PER_SHARD:
            part = pa.Table.from_pylist(records[:_ROWS_PER_SHARD], schema=schema)
            shards.append(write_shard(store, work.folder, len(shards), part))
            del records[:_ROWS_PER_SHARD]
    if records:
        rest = pa.Table.from_pylist(records, schema=schema)
        shards.append(write_shard(store, work.folder, len(shards), rest))
    return Product(shards, outcome={"rows": kept, "skipped": skipped})


def _wanted(identity: Mapping[str, Any]) -> str:
    """What a row has to be, to be of use."""
    prompt = f"prompt of at most {identity['limit']} tokens"
    if "response_limit" not in identity:
        return prompt
    return f"{prompt} with responses of at most {identity['response_limit']}"


def _encoded(
    tokenizer: Any, source: DataSource, data: DataConfig, identity: Mapping[str, Any]
) -> Iterator[dict[str, Any] | None]:
    """A record for each row of ``source``; None for one over a limit that is to be skipped."""
    for row in read_rows(source, data.template):
        record = _record(tokenizer, source, row, data.template)
        problem = _too_long(record, identity)
        if problem is None:
            yield record
        elif data.overlong == "skip":
            yield None
        else:
            raise ValueError(f"{row.place}: {problem}, or set data.overlong=skip")


def _too_long(record: Mapping[str, Any], identity: Mapping[str, Any]) -> str | None:
    """What of a record is over its limit."""
    parts = (
        ("prompt", "token_ids", "limit", "data.max_prompt_tokens"),
        ("chosen response", "chosen_ids", "response_limit", "rollout.max_new_tokens"),
        ("rejected response", "rejected_ids", "response_limit", "rollout.max_new_tokens"),
    )
    for what, column, limit, field in parts:
        if column in record and len(record[column]) > identity[limit]:
            return (
                f"the {what} has {len(record[column])} tokens, and the limit is "
                f"{identity[limit]}: shorten it, raise {field}"
            )
    return None


def encode_prompt(tokenizer: Any, row: Row, template: str) -> tuple[str, list[int]]:
    """Text and token ids of a prompt.

    A chat template writes the begin token itself, so its text is encoded without special
    tokens; plain text gets those that the tokenizer adds. Either way there is one.
    """
    if template == "plain":
        text = str(row.prompt)
        return text, list(tokenizer(text)["input_ids"])
    messages = as_messages(row.prompt)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _record(tokenizer: Any, source: DataSource, row: Row, template: str) -> dict[str, Any]:
    text, token_ids = encode_prompt(tokenizer, row, template)
    record = {
        "prompt_id": row.digest,
        "source": source.name,
        "row": row.number,
        "token_ids": token_ids,
        "text": text,
        "ground_truth": row.answer,
        "extra": json.dumps(row.extra, sort_keys=True, ensure_ascii=False),
        "messages": _messages(row, template),
    }
    if row.pair is None:
        return record
    pair = encode_pair(tokenizer, row.place, row.prompt, row.pair, template, text, token_ids)
    return record | {
        "token_ids": pair.prompt_ids,
        "chosen_ids": pair.chosen_ids,
        "rejected_ids": pair.rejected_ids,
        "chosen_text": text_of(row.pair.chosen),
        "rejected_text": text_of(row.pair.rejected),
    }


def _messages(row: Row, template: str) -> str | None:
    """What a chat template renders, as JSON; None for plain text."""
    if template == "plain":
        return None
    return json.dumps(as_messages(row.prompt), ensure_ascii=False)


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
