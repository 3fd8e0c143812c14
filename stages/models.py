"""Hugging Face folders: what can be read of one cheaply, and loading it.

Importing this module loads no torch; loading a model does.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.keys import key_of, sha256
from stages.attention_layers import unserved_layers

if TYPE_CHECKING:
    import torch

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# Heads whose logits are not a plain product would be trained on the wrong distribution.
_UNSERVED = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def read_config(model: str) -> dict[str, Any]:
    """``config.json`` of a Hugging Face folder.

    Raises:
        ValueError: there is no such folder, or no model that we can train in it.
    """
    path = Path(model) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"model is {model!r}, and there is no {path}: give the folder of a Hugging Face model"
        )
    config: dict[str, Any] = json.loads(path.read_text())
    for name in _UNSERVED:
        if config.get(name) not in (None, 1, 1.0):
            raise ValueError(f"model {model!r} sets {name}={config[name]}, which is not served yet")
    _refuse_layers(model, config)
    return config


def _refuse_layers(model: str, config: Mapping[str, Any]) -> None:
    if layers := unserved_layers(config):
        raise ValueError(
            f"model {model!r} has {layers}, and packed sequences are served by plain attention "
            "over all of a sequence only: take a model that has it in every layer"
        )
    dropout = config.get("attention_dropout") or config.get("attn_pdrop") or 0.0
    if dropout > 0:
        raise ValueError(
            f"model {model!r} has a dropout of {dropout} in attention, which is not served: "
            "set it to 0.0 in its config.json"
        )


def changing_rope(model: str) -> str | None:
    """The kind of the model's rotary embeddings where they depend on how long a row's longest
    sequence is; else None."""
    config = read_config(model)
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type")
    return str(kind) if kind in ("dynamic", "longrope") else None


def attention_heads(model: str) -> int:
    """Query heads of a layer; 0 where the configuration doesn't say."""
    config = read_config(model)
    return int(config.get("num_attention_heads") or config.get("n_head") or 0)


def context_length(model: str) -> int:
    """Longest sequence that the model's positions reach, in tokens."""
    return int(read_config(model).get("max_position_embeddings") or 2048)


def vocabulary_size(model: str) -> int:
    """How many tokens the model has embeddings for; 0 where its configuration doesn't say."""
    return int(read_config(model).get("vocab_size") or 0)


def has_chat_template(model: str) -> bool:
    """Whether the folder's tokenizer brings a chat template."""
    folder = Path(model)
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and bool(json.loads(path.read_text()).get("chat_template"))


@lru_cache(maxsize=8)
def model_digest(model: str) -> str:
    """Digest of the folder's configuration and weights."""
    names = sorted(p.name for p in Path(model).glob("*.safetensors"))
    if not names:
        raise ValueError(f"model {model!r} has no *.safetensors: save it with save_pretrained")
    return _files_digest(Path(model), ["config.json", "generation_config.json", *names])


@lru_cache(maxsize=8)
def tokenizer_digest(model: str) -> str:
    """Digest of the folder's tokenizer files."""
    return _files_digest(Path(model), _TOKENIZER_FILES)


def _files_digest(folder: Path, names: Any) -> str:
    files = [(name, folder / name) for name in names]
    return key_of({name: sha256(path.read_bytes()) for name, path in files if path.is_file()})


def load_causal_lm(model: str, dtype: "torch.dtype") -> Any:
    """The folder's model on the CPU, set up for packed sequences (``stages/packed.py``)."""
    import transformers

    from stages.packed import ATTENTION

    transformers.utils.logging.disable_progress_bar()
    _refuse_family(model, transformers.AutoModelForCausalLM)
    return transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, attn_implementation=ATTENTION
    )


def _refuse_family(model: str, auto: Any) -> None:
    """Refuse, before a weight is read, what only the family's code can tell.

    Its defaults may have layers that the folder's file leaves unsaid; and its attention may not go
    through transformers' interface, so that it would run over a packed row as if it were one
    sequence.

    Raises:
        ValueError: it is one of these.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    _refuse_layers(model, config.to_dict())
    family = auto._model_mapping.get(type(config), None)
    if family is not None and not family._supports_attention_backend:
        raise ValueError(
            f"model {model!r} is a {family.__name__}, whose attention does not go through "
            "transformers' attention interface, so packed sequences can't be told apart in it: "
            "take another model"
        )


def check_value_model(model: str) -> None:
    """Refuse a folder that no value model is made of.

    Raises:
        ValueError: it is a classifier with more labels than one, or no decoder.
    """
    config = read_config(model)
    architecture = _architecture(config)
    if architecture.endswith("ForCausalLM"):
        return
    if not architecture.endswith(("ForSequenceClassification", "ForTokenClassification")):
        raise ValueError(
            f"model {model!r} is a {architecture or 'model of no architecture'}, and values come "
            "from a causal language model, or a classifier with one label"
        )
    labels = len(config.get("id2label") or (0, 1))  # two are the default, which isn't written
    if labels != 1:
        raise ValueError(
            f"model {model!r} is a {architecture} with {labels} labels, and a value is one number: "
            "give one with num_labels 1, or a causal language model"
        )


def load_value_model(model: str) -> Any:
    """The folder's model in float32 on the CPU, with a head ``score`` of one output.

    A classifier with one label, such as a reward model, brings its head. A causal language model
    has none, and gets one of zeros: its first values are 0, so nothing that was never learned
    moves an advantage, and no random number is drawn.
    """
    import torch
    import transformers

    from stages.packed import ATTENTION

    transformers.utils.logging.disable_progress_bar()
    is_of_tokens = _architecture(read_config(model)).endswith("ForTokenClassification")
    kind: Any = (
        transformers.AutoModelForTokenClassification
        if is_of_tokens
        else transformers.AutoModelForSequenceClassification
    )
    _refuse_family(model, kind)
    with _silent(transformers.utils.logging):  # a head that is made here is no news
        made, loading = kind.from_pretrained(
            model,
            num_labels=1,
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
    missing = set(loading["missing_keys"])
    if missing - {"score.weight"}:
        raise ValueError(f"model {model!r} lacks {', '.join(sorted(missing)[:3])}: save it whole")
    if missing:
        torch.nn.init.zeros_(made.score.weight)
    return made


def load_classifier(model: str, dtype: str) -> Any:
    """The folder's sequence classifier on the CPU, with the head that it was saved with.

    Args:
        dtype: a torch dtype's name, or ``auto`` for that of the files.

    Raises:
        ValueError: weights are missing, which would be drawn at random.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with _silent(transformers.utils.logging):
        made, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
            model,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            output_loading_info=True,
        )
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ValueError(
            f"model {model!r} lacks {', '.join(missing[:3])}, which would be drawn at random: "
            "save it whole"
        )
    return made


def _architecture(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or [""])[0])


@contextmanager
def _silent(logging: Any) -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _compute_repeatably() -> None:
    """The same update twice gives the same bits on a GPU too: a replay is held against them.

    Attention's backward and some matrix products add up in no fixed order otherwise.
    """
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # we read none, and it costs


def device_of_this_process() -> "torch.device":
    """The GPU that was given to this process, else the CPU."""
    import torch

    if torch.cuda.is_available():
        _compute_repeatably()
        torch.cuda.set_device(0)  # collectives of objects go through the current device
        return torch.device("cuda", 0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return torch.device("cpu")
