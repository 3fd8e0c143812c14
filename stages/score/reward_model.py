"""A sequence classifier's logit of a prompt and response, batched by token budget.

A sample's reward is what the model gives for it alone, without padding; in a batch, up to the
rounding of another order of sums. So padding goes to the right, whatever side the tokenizer has:
positions then count from the first token as they do alone, and a decoder sees none of it.

Shapes: B samples of a batch, L tokens of the longest, C labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.models import device_of_this_process, load_classifier
from stages.score.checkpoint import (
    check_checkpoint,
    check_vocabulary,
    label_index,
    position_limit,
    template_of,
)
from stages.score.conversation import prompt_for_people, prompt_messages
from stages.score.outcomes import Failure, Outcome, checked_value, failed
from stages.score.reward_model_spec import RewardModelSpec

# What tokenizers without a limit of their own say that it is.
_NO_LIMIT = 10**9


@dataclass(frozen=True)
class Encoded:
    """A sample's tokens; of a pair of texts also which text each is of, where that is embedded."""

    ids: Sequence[int]
    types: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.ids)


class RewardModel:
    """A model and its tokenizer, loaded once.

    Raises:
        ValueError: the folder holds no whole reward model.
    """

    def __init__(self, spec: RewardModelSpec) -> None:
        from transformers import AutoTokenizer

        self._spec = spec
        check_checkpoint(spec)  # of another machine's disk it may be another
        self._label, self._template = label_index(spec), template_of(spec)
        self._tokenizer = AutoTokenizer.from_pretrained(spec.model)
        check_vocabulary(spec, max(self._tokenizer.get_vocab().values()))
        limits = [self._tokenizer.model_max_length, position_limit(spec) or _NO_LIMIT]
        self._limit = int(min(*limits, _NO_LIMIT))
        self.device = device_of_this_process()
        self._model = load_classifier(spec.model, spec.dtype).to(self.device).eval()
        self._pad = _own_padding(self._model.config.get_text_config())

    def encoded(self, row: Mapping[str, Any]) -> Encoded | Outcome:
        """A rollout row's prompt and response; the outcome where they can't be read.

        A template writes the begin token itself, so its text gets no special tokens; plain text
        and pairs get those that the tokenizer adds. Nothing is ever cut off.
        """
        try:
            tokens = self._tokens(row)
        except Exception as error:  # a template is a program, and may refuse a conversation
            return failed(error)
        if 0 < len(tokens) <= self._limit:
            return tokens
        return Outcome(
            failure=Failure(
                "SampleTooLong" if len(tokens) else "SampleEmpty",
                f"prompt and response have {len(tokens)} tokens, and the reward model reads 1 "
                f"to {self._limit}; nothing is cut off",
            )
        )

    def batches(self, tokens: Mapping[int, Encoded]) -> list[list[int]]:
        """The keys of ``tokens`` in batches of like lengths, the longest first.

        A batch has at most ``max_tokens_per_batch`` tokens, padding included, but for a sample
        that is longer by itself.
        """
        order = sorted(tokens, key=lambda n: (-len(tokens[n]), n))
        found = []
        while order:
            count = max(1, self._spec.max_tokens_per_batch // len(tokens[order[0]]))
            found.append(order[:count])
            del order[:count]
        return found

    @torch.inference_mode()
    def values(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """The chosen label's logit of each sample, in order."""
        lengths_B = torch.tensor([len(sample) for sample in batch])
        inputs = {
            "input_ids": _padded([sample.ids for sample in batch], self._padding(batch)),
            "attention_mask": (torch.arange(max(map(len, batch))) < lengths_B[:, None]).long(),
        }
        types = [sample.types for sample in batch if sample.types is not None]
        if types:
            inputs["token_type_ids"] = _padded(types, 0)
        made = self._model(**{name: each_BL.to(self.device) for name, each_BL in inputs.items()})
        logits_BC = made.logits.float().cpu()
        return [checked_value(value) for value in logits_BC[:, self._label].tolist()]

    def _tokens(self, row: Mapping[str, Any]) -> Encoded:
        if self._template == "pair":
            pair = self._tokenizer(prompt_for_people(row), row["text"], verbose=False)
            return Encoded(pair["input_ids"], pair.get("token_type_ids"))
        if self._template == "plain":
            text = row["prompt_text"] + row["text"]
            return Encoded(self._tokenizer(text, verbose=False)["input_ids"])
        messages = [*prompt_messages(row), {"role": "assistant", "content": row["text"]}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return Encoded(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _padding(self, batch: Sequence[Encoded]) -> int:
        """The token to pad with.

        Decoders read their head's output at the last token that is not ``config.pad_token_id``.
        Without that they refuse a batch, and alone they read the last token: so it is set to a
        token that is the last one of no sample, and they read the last token in a batch too.
        """
        if self._pad is not None:
            return self._pad
        config = self._model.config.get_text_config()
        last = {sample.ids[-1] for sample in batch}
        config.pad_token_id = next(token for token in range(len(last) + 1) if token not in last)
        return int(config.pad_token_id)


def _padded(rows: Sequence[Sequence[int]], pad: int) -> torch.Tensor:
    """(B, L) of ``rows``, with ``pad`` to the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])


def _own_padding(config: Any) -> int | None:
    """The model's padding token; None where there is none, or it is outside of the vocabulary."""
    token = config.pad_token_id
    return int(token) if token is not None and 0 <= token < config.vocab_size else None
