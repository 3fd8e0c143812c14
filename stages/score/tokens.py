"""The text that each response token adds, for rewards that speak of tokens."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any


def check_tokenizer(model: str) -> None:
    """Raise ValueError where the model's folder has no tokenizer that this module reads."""
    path = Path(model, "tokenizer.json")
    if not path.is_file():
        raise ValueError(
            f"a reward is per token, and there is no {path}: save the model's fast tokenizer there"
        )


def token_texts(model: str, response_ids: Sequence[int]) -> list[str]:
    """One text a token; together they are the response, special tokens left out.

    A character that several tokens make up stands at the last of them, and the others have "".
    Where generation ended at a stop string, the response's ``text`` is cut before it, and these
    texts go on.
    """
    from tokenizers.decoders import DecodeStream

    tokenizer = _tokenizer(model)
    stream = DecodeStream(skip_special_tokens=True)
    return [stream.step(tokenizer, token) or "" for token in response_ids]


def largest_token(model: str) -> int:
    """The greatest id that the folder's ``tokenizer.json`` gives."""
    return max(_tokenizer(model).get_vocab(with_added_tokens=True).values())


@lru_cache(maxsize=2)
def _tokenizer(model: str) -> Any:
    from tokenizers import Tokenizer

    check_tokenizer(model)
    return Tokenizer.from_file(str(Path(model, "tokenizer.json")))
