"""Small real things that tests train on: Hugging Face folders, data, rewards."""

import json
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+-=> abcdefghijklmnopqrstuvwxyz"
SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHAT = (
    "<bos>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)


def tokenizer(chat_template: str | None = None) -> Any:
    """One token a character; adds <bos> in front, and <eos> between two texts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(
        single="<bos> $A",
        pair="<bos> $A <eos> $B:1 <eos>:1",
        special_tokens=[("<bos>", 1), ("<eos>", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=chat_template,
    )


def model(kind: str = "llama", tied: bool = True, seed: int = 0, layers: int = 2) -> Any:
    """A random model whose logits are spread enough for sampling to mean something."""
    import torch
    import transformers

    classes = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }
    config = classes[kind](
        vocab_size=48,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    made.generation_config.update(eos_token_id=2, pad_token_id=0, bos_token_id=1)
    return made


def save_model(folder: Path, chat_template: str | None = None, **options: Any) -> Path:
    """A model and its tokenizer as a Hugging Face folder."""
    model(**options).save_pretrained(folder)
    tokenizer(chat_template).save_pretrained(folder)
    return folder


def save_prompts(path: Path, count: int = 12) -> Path:
    """Sums to continue, with their answers."""
    rows = [{"prompt": f"{n}+{n + 3}=", "answer": str(2 * n + 3), "n": n} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def classifier(kind: str = "llama", labels: int = 1, pad: int | None = 0) -> Any:
    """A random sequence classifier whose outputs differ from text to text."""
    import torch
    import transformers

    sizes: dict[str, dict[str, Any]] = {
        "llama": {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128},
        "gpt2": {"n_positions": 128},  # its positions are learned, and count padding before it
        "bert": {"max_position_embeddings": 128},
        "roberta": {"max_position_embeddings": 128},
    }
    classes = {
        "llama": transformers.LlamaConfig,
        "gpt2": transformers.GPT2Config,
        "bert": transformers.BertConfig,
        "roberta": transformers.RobertaConfig,
    }
    config = classes[kind](
        vocab_size=48,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=pad,
        bos_token_id=1,
        eos_token_id=2,
        num_labels=labels,
        **sizes[kind],
    )
    torch.manual_seed(1)
    made = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return made


def save_classifier(folder: Path, chat_template: str | None = None, **options: Any) -> Path:
    """A sequence classifier and its tokenizer as a Hugging Face folder."""
    classifier(**options).save_pretrained(folder)
    tokenizer(chat_template).save_pretrained(folder)
    return folder
