"""What can be known of a reward model's folder before it is loaded: its labels, head, vocabulary.

No torch is loaded here.
"""

import json
import struct
from pathlib import Path
from typing import Any

from artifacts.keys import key_of
from stages.models import has_chat_template, model_digest, tokenizer_digest
from stages.score.reward_model_spec import RewardModelJob, RewardModelSpec
from stages.score.tokens import largest_token

_KIND = "ForSequenceClassification"
# Where the classes of transformers keep what they put on top of the decoder or encoder.
_HEADS = ("score", "classifier", "classification_head", "pre_classifier", "out_proj", "dense")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spm.model", "vocab.txt", "vocab.json")
# Their positions are counted from the padding token's number on.
_COUNTS_AFTER_PADDING = (
    "camembert",
    "longformer",
    "mpnet",
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
)
# They read the last position, which is padding in a batch.
_READS_THE_END = ("xlnet",)


def check_checkpoint(spec: RewardModelSpec) -> None:
    """Refuse a folder that gives no reward for what it is asked.

    Raises:
        ValueError: it is no classifier, has no head, more labels than one is chosen of, no
            tokenizer, or one of another vocabulary.
    """
    config = read_checkpoint_config(spec)
    architecture = (config.get("architectures") or ["model of no architecture"])[0]
    if not architecture.endswith(_KIND):
        raise ValueError(
            f"{_named(spec)} is a {architecture}, and a reward model is a …{_KIND}: give the "
            "folder of one"
        )
    if config.get("model_type") in _READS_THE_END:
        raise ValueError(f"{_named(spec)} is a {config['model_type']}, which is not served yet")
    label_index(spec)
    _check_head(spec, len(labels_of(config)))
    if not any(Path(spec.model, name).is_file() for name in _VOCABULARIES):
        raise ValueError(f"{_named(spec)} has no tokenizer: save its own in the same folder")
    if Path(spec.model, "tokenizer.json").is_file():
        check_vocabulary(spec, largest_token(spec.model))
    if spec.template == "chat" and not has_chat_template(spec.model):
        raise ValueError(
            f"{_named(spec)} has no chat template, and its template is chat: take plain or "
            "pair, or add chat_template.jinja to its folder"
        )


def check_vocabulary(spec: RewardModelSpec, largest: int) -> None:
    """Refuse a tokenizer whose ``largest`` token the model has no embedding for."""
    size = int(_of_text(read_checkpoint_config(spec), "vocab_size") or 0)
    if size and largest >= size:
        raise ValueError(
            f"{_named(spec)} has embeddings for {size} tokens, and its tokenizer goes up to "
            f"{largest}: the folder holds the tokenizer of another model"
        )


def checkpoint_digest(spec: RewardModelSpec) -> str:
    """Digest of the folder's configuration, weights and tokenizer."""
    return key_of({"model": model_digest(spec.model), "tokenizer": tokenizer_digest(spec.model)})


def check_digest(job: RewardModelJob) -> None:
    """Raise ValueError where the folder holds another model than the scores' key names."""
    if job.digest is not None and checkpoint_digest(job.spec) != job.digest:
        raise ValueError(
            "its folder holds other files than when the run began: give them back, or score in a "
            "run of its own (ratchet rescore)"
        )


def template_of(spec: RewardModelSpec) -> str:
    """How prompt and response are put together; see ``RewardModelSpec.template``."""
    return spec.template or ("chat" if has_chat_template(spec.model) else "plain")


def label_index(spec: RewardModelSpec) -> int:
    """Which of the model's outputs is the reward.

    Raises:
        ValueError: there are several and none is chosen, or none of the name.
    """
    labels = labels_of(read_checkpoint_config(spec))
    if spec.label is None:
        if len(labels) == 1:
            return 0
        raise ValueError(
            f"{_named(spec)} has {len(labels)} labels ({', '.join(labels)}), and a reward is one "
            "number: say with label which one it is"
        )
    if spec.label not in labels:
        raise ValueError(f"{_named(spec)} has no label {spec.label!r}; it has {', '.join(labels)}")
    return labels.index(spec.label)


def labels_of(config: dict[str, Any]) -> list[str]:
    """The names of the model's outputs, in order."""
    names = config.get("id2label")
    if names:
        return [str(names[key]) for key in sorted(names, key=int)]
    count = int(config.get("num_labels") or 2)  # two are the default, which isn't written
    return [f"LABEL_{number}" for number in range(count)]


def position_limit(spec: RewardModelSpec) -> int | None:
    """Positions that the configuration speaks of; None where it has no limit."""
    config = read_checkpoint_config(spec)
    found = _of_text(config, "max_position_embeddings") or _of_text(config, "n_positions")
    if not found or int(found) <= 0:
        return None
    if config.get("model_type") in _COUNTS_AFTER_PADDING:
        padding = config.get("pad_token_id")
        return int(found) - 1 - (1 if padding is None else int(padding))
    return int(found)


def read_checkpoint_config(spec: RewardModelSpec) -> dict[str, Any]:
    """``config.json`` of the folder. Raises ValueError where there is none."""
    path = Path(spec.model) / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{_named(spec)} has no {path}: give the folder of a Hugging Face sequence classifier"
        )
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def _check_head(spec: RewardModelSpec, num_labels: int) -> None:
    """Refuse weights without a head: a new one would be drawn at random."""
    shapes = _weight_shapes(Path(spec.model))
    if not shapes:
        raise ValueError(f"{_named(spec)} has no *.safetensors: save it with save_pretrained")
    heads = {name: shape for name, shape in shapes.items() if name.partition(".")[0] in _HEADS}
    if not heads:
        raise ValueError(
            f"{_named(spec)} has no weights of a head ({', '.join(_HEADS[:3])}, …), which would "
            "be drawn at random: give a trained reward model"
        )
    last = heads.get("score.weight") or heads.get("classifier.weight")
    if last is not None and last[0] != num_labels:
        raise ValueError(
            f"{_named(spec)} has {num_labels} labels by its config.json, and weights for "
            f"{last[0]}: correct id2label there"
        )


def _weight_shapes(folder: Path) -> dict[str, list[int]]:
    """Name to shape of all tensors, from the files' headers."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        shapes |= {n: entry["shape"] for n, entry in header.items() if n != "__metadata__"}
    return shapes


def _of_text(config: dict[str, Any], name: str) -> Any:
    """A field of the part that reads text, where a model has several."""
    return config.get(name) or (config.get("text_config") or {}).get(name)


def _named(spec: RewardModelSpec) -> str:
    return f"reward {spec.column!r}: model {spec.model!r}"
