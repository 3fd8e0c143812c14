"""Preference pairs of a data file: two given responses to a prompt, read and tokenised.

A response's tokens are the template's own continuation of the prompt, end token included. They are
what is left of the tokens of the whole conversation after those that the prompt alone, the
conversation with the chosen response and that with the rejected one begin with in common. So
prompt and response together are always the whole conversation as it is tokenised. Where the
tokenizer merges characters across the border, the token that crosses it, and what depends on it,
belongs to the responses, and the prompt is shorter by as much for both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from stages.rollout.config import DataSource

# Text, or with a chat template one message of the assistant.
Response = str | dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """The better and the worse response of a data row."""

    chosen: Response
    rejected: Response


@dataclass(frozen=True)
class PairTokens:
    """A pair tokenised. ``prompt_ids`` are those of both, and never empty, nor is a response."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]


def as_messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A prompt for a chat template: text is what the user says."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def read_pair(
    place: str, record: Mapping[str, Any], source: DataSource, template: str
) -> Pair | None:
    """The pair of a data row; None where the data holds none.

    Raises:
        ValueError: one is none, or both are the same; the message begins with ``place``.
    """
    if source.chosen is None or source.rejected is None:
        return None
    prompt = as_messages(record[source.prompt])
    chosen, rejected = (
        _response(f"{place}: column {column!r}", record[column], prompt, template)
        for column in (source.chosen, source.rejected)
    )
    if text_of(chosen) == text_of(rejected):
        raise ValueError(
            f"{place}: columns {source.chosen!r} and {source.rejected!r} hold the same response: "
            "neither can be preferred, so leave the row out"
        )
    return Pair(chosen, rejected)


def _response(
    where: str, value: Any, prompt: Sequence[Mapping[str, Any]], template: str
) -> Response:
    """One response: text, or the assistant's message, alone or after the prompt's messages."""
    if isinstance(value, str) and value:
        return value
    if not value or not isinstance(value, list):
        raise ValueError(f"{where} is {value!r}, not a text or messages")
    if template == "plain":
        raise ValueError(f"{where} holds messages, which need a chat template: set template=chat")
    rest = value[len(prompt) :] if value[: len(prompt)] == prompt else value
    message = rest[0] if len(rest) == 1 and isinstance(rest[0], dict) else {}
    if message.get("role") != "assistant" or not message.get("content"):
        raise ValueError(
            f"{where} is not the assistant's one message that follows the prompt: it has "
            f"{len(rest)} after the prompt's; write a text, or one message with a content"
        )
    return dict(message)


def text_of(response: Response) -> str:
    """A response for people."""
    return response if isinstance(response, str) else str(response["content"])


def encode_pair(
    tokenizer: Any,
    place: str,
    prompt: str | list[dict[str, Any]],
    pair: Pair,
    template: str,
    text: str,
    prompt_ids: Sequence[int],
) -> PairTokens:
    """The tokens of ``pair`` as they go on from ``prompt``.

    Args:
        text, prompt_ids: the prompt as rendered and as tokenised alone.

    Raises:
        ValueError: the template doesn't go on from the prompt, or makes the two the same.
    """
    chosen, rejected = (
        _whole_ids(tokenizer, place, prompt, response, template, text)
        for response in (pair.chosen, pair.rejected)
    )
    start = _num_common(prompt_ids, chosen, rejected)
    tokens = PairTokens(chosen[:start], chosen[start:], rejected[start:])
    if tokens.chosen_ids == tokens.rejected_ids:
        raise ValueError(
            f"{place}: the two responses have the same tokens: neither can be preferred, so leave "
            "the row out"
        )
    if not (tokens.prompt_ids and tokens.chosen_ids and tokens.rejected_ids):
        raise ValueError(
            f"{place}: of {len(chosen)} and {len(rejected)} tokens, {start} are the prompt's: "
            "prompt and both responses need one at least, so leave the row out"
        )
    return tokens


def _whole_ids(
    tokenizer: Any,
    place: str,
    prompt: str | list[dict[str, Any]],
    response: Response,
    template: str,
    text: str,
) -> list[int]:
    """Tokens of prompt and response as one text, to the end token.

    A chat template writes its own ends; after plain text comes the tokenizer's end token.
    """
    if template == "plain":
        ids = list(tokenizer(text + text_of(response))["input_ids"])
        end = tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]
    if isinstance(response, str):
        response = {"role": "assistant", "content": response}
    whole = tokenizer.apply_chat_template([*as_messages(prompt), response], tokenize=False)
    if not whole.startswith(text):
        raise ValueError(
            f"{place}: the chat template writes the prompt in another way where a response "
            "follows it, so no token is surely the response's: mend the template, or take "
            "data.template=plain"
        )
    return list(tokenizer(whole, add_special_tokens=False)["input_ids"])


def _num_common(*sequences: Sequence[int]) -> int:
    """How many tokens all of them begin with in common."""
    columns = zip(*sequences, strict=False)
    return sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, columns))
