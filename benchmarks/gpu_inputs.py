"""What ``gpu_flow.py`` trains on: a random model, a tokenizer, prompts and a reward."""

import json
import random
from pathlib import Path
from typing import Any

QWEN = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
TINY = QWEN | {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4}
CHARACTERS = "0123456789+-=? abcdefghijklmnopqrstuvwxyz"
SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHAT = (
    "<bos>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def vowel_share(text: str, ground_truth: str | None = None, **row: Any) -> float:
    """A reward that any text has: random tokens are random letters, so groups have spread."""
    return sum(character in "aeiou" for character in text) / max(len(text), 1)


def word(number: int) -> str:
    """Four letters, another word for every number: tokens that no prompt is made of."""
    letters = []
    for _ in range(4):
        number, letter = divmod(number, 26)
        letters.append(chr(ord("a") + letter))
    return "".join(letters)


def make_tokenizer(size: int) -> Any:
    """A character tokenizer whose vocabulary fills the model's, so that all it samples has text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIALS, *CHARACTERS]
    tokens += [word(n) for n in range(size - len(tokens))]
    inner = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIALS, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=CHAT, **names)


def make_model(folder: Path, sizes: dict[str, int]) -> None:
    """A random model in bfloat16, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        **sizes,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    make_tokenizer(sizes["vocab_size"]).save_pretrained(folder)


def make_prompts(path: Path, count: int = 1024) -> None:
    """Sums and differences with their answers, as JSON lines."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            a, b = draw.randrange(1000), draw.randrange(1000)
            sign, answer = draw.choice([("+", a + b), ("-", a - b)])
            row = {"prompt": f"what is {a}{sign}{b}?", "answer": str(answer)}
            file.write(json.dumps(row) + "\n")
