"""Rollout rows as real ones are, without an engine: text, tokens and log-probs that compress alike.

Text is Python's own documentation and library source, cut into prompts and responses that are
nowhere repeated but for the prompt of a group; tokens are the given tokenizer's. Log-probs are
float32 log-softmaxes of bfloat16 logits, as engines give them, each of a token drawn from them.
"""

import os
import pydoc_data.topics
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from artifacts import schemas

SAMPLES = 8
PROMPT_TOKENS = 60
_CANDIDATES = 64


def rollout_table(model: str, rows: int, mean_tokens: int = 250) -> pa.Table:
    """``rows`` rollouts in groups of 8; response lengths are lognormal about ``mean_tokens``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(mean_tokens) - 0.18, 0.6, rows), 8, None).astype(int)
    lengths = np.minimum(lengths, 4 * mean_tokens)
    tokens = _tokens(tokenizer)
    need = int(lengths.sum()) + PROMPT_TOKENS * (rows // SAMPLES + 1)
    stream = list(islice(tokens, need))
    if len(stream) < need:
        raise ValueError(f"the text has {len(stream)} tokens and {need} are needed: fewer rows")
    logprobs = logprobs_of_drawn(rng, need)
    records, place = [], 0
    for index, length in enumerate(lengths):
        if index % SAMPLES == 0:
            prompt = stream[place : place + PROMPT_TOKENS]
            place += PROMPT_TOKENS
        ids = stream[place : place + length]
        records.append(_record(tokenizer, index, prompt, ids, logprobs[place : place + length]))
        place += length
    return pa.Table.from_pylist(records, schema=schemas.ROLLOUTS)


def logprobs_of_drawn(rng: np.random.Generator, count: int) -> np.ndarray:
    """Log-probs of ``count`` tokens drawn from softmaxes that are sharp here and flat there."""
    parts = []
    for start in range(0, count, 65536):
        size = min(65536, count - start)
        sharpness = rng.uniform(1, 12, (size, 1)).astype(np.float32)
        logits = rng.standard_normal((size, _CANDIDATES), np.float32) * sharpness
        logits = (logits.view(np.uint32) & 0xFFFF0000).view(np.float32)  # bfloat16's bits
        logits -= logits.max(1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True, dtype=np.float32))
        drawn = (logprobs + rng.gumbel(size=logprobs.shape)).argmax(1)
        parts.append(logprobs[np.arange(size), drawn])
    return np.concatenate(parts)


def _tokens(tokenizer) -> Iterator[int]:
    """Tokens of the language's documentation, then of the standard library, in order."""
    for text in pydoc_data.topics.topics.values():
        yield from tokenizer(text)["input_ids"]
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        yield from tokenizer(path.read_text(encoding="utf-8"))["input_ids"]


def _record(tokenizer, index: int, prompt: list[int], ids: list[int], logprobs: np.ndarray) -> dict:
    group, k = divmod(index, SAMPLES)
    return {
        "sample_id": f"000001-{group:05d}-{k:03d}",
        "group_id": f"000001-{group:05d}",
        "prompt_id": f"{hash((group, 1)) & (2**64 - 1):016x}" * 4,
        "row": group * 37 % 7919,
        "epoch": 0,
        "sample_index": k,
        "seed": hash((group, k)) & (2**62 - 1),
        "prompt_ids": prompt,
        "response_ids": ids,
        "logprobs": logprobs,
        "loss_mask": np.ones(len(ids), np.int8),
        "finish_reason": "length" if index % 11 == 0 else "stop",
        "text": tokenizer.decode(ids),
        "prompt_text": tokenizer.decode(prompt),
        "ground_truth": str(group),
        "extra": "{}",
        "policy_version": 0,
        "policy_digest": "0" * 64,
    }
