"""What a trainer rank needs of memory, from a model's shapes alone: no torch, no weights.

An estimate of the peak, in backward, of one rank. Its parts:

- *state*: float32 weights, gradients and two AdamW moments, sharded over the ranks.
- *gathered*: what FSDP holds whole at a time, in the compute type: embeddings and head, with the
  gradient of each, and two decoder layers (the one at work and the one fetched ahead).
- *activations*: what autograd keeps of a micro-batch of ``max_tokens_per_rank`` tokens. A layer
  keeps, a token, with b bytes a number: two RMSNorms (float32 input, normalised, output: 4E + 2bE
  each), queries, keys, values and attention's output (b (2Q + 2K)), four vectors of the MLP (4bF).
  With checkpointing each layer keeps its input (bE), and one layer at a time all of it.
- *head*: of each token the last norm (4E + 2bE), the hidden state and its gradient (2bE); a chunk's
  logits three times in float32, and the head's float32 gradient.

A critic has a state and gathered layers of its own; its activations are not there at the same time
as the policy's.

Shapes: E model width, Q query and K key width (heads x head width), F MLP width, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from stages.models import read_config
from stages.update.config import UpdateConfig
from stages.update.trainer_spec import TrainerSpec

GIB = 1 << 30
# What the estimate leaves to the driver, the allocator's gaps, and the kernels' own space.
_USABLE = 0.9

_STATE_BYTES = 4 * 4
_CHUNK_COPIES = 3
_LAYERS_GATHERED = 2
_WIDTHS = {"float32": 4, "bfloat16": 2}
# Of stages/logprobs.py, which loads torch; a test holds the two together.
CHUNK = 1024


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that its memory follows from; parameters that are tied count once."""

    num_layers: int
    width: int
    query_width: int
    key_width: int
    mlp_width: int
    vocabulary: int
    num_parameters: int
    layer_parameters: int
    normalizes_heads: bool

    @property
    def root_parameters(self) -> int:
        """Those outside the decoder layers: embeddings, head, and the last norm."""
        return self.num_parameters - self.num_layers * self.layer_parameters


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank; see the module's docstring."""

    state: int
    gathered: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.gathered + self.activations + self.head


def model_shape(model: str) -> ModelShape:
    """The shape of a Hugging Face folder, from its configuration and its weights' headers.

    Raises:
        ValueError: the configuration lacks a size that every decoder has.
    """
    config = read_config(model)
    try:
        layers, width = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads = int(config["num_attention_heads"])
        mlp_width = int(config["intermediate_size"])
    except KeyError as error:
        raise ValueError(f"model {model!r} has no {error.args[0]} in its config.json") from error
    head_width = int(config.get("head_dim") or width // heads)
    sizes = dict(_parameter_sizes(model))
    in_layers = sum(size for name, size in sizes.items() if ".layers." in name)
    return ModelShape(
        num_layers=layers,
        width=width,
        query_width=heads * head_width,
        key_width=int(config.get("num_key_value_heads") or heads) * head_width,
        mlp_width=mlp_width,
        vocabulary=int(config.get("vocab_size") or 0),
        num_parameters=sum(sizes.values()),
        layer_parameters=-(-in_layers // layers),
        normalizes_heads=any(name.endswith(".q_norm.weight") for name in sizes),
    )


def estimate_memory(
    shape: ModelShape, config: UpdateConfig, ranks: int, longest: int, checkpoints: bool
) -> MemoryEstimate:
    """Peak bytes of one of ``ranks`` ranks.

    Args:
        longest: tokens of the longest sample, which gets a micro-batch of its own where it is
            over the budget.
        checkpoints: whether activations are made again in backward.
    """
    width = _WIDTHS[config.dtype]
    tokens = max(config.max_tokens_per_rank, -(-longest // config.sp))
    layer = tokens * _layer_bytes(shape, width)
    kept = shape.num_layers * (tokens * width * shape.width if checkpoints else layer)
    return MemoryEstimate(
        state=_STATE_BYTES * shape.num_parameters // ranks,
        gathered=width * (2 * shape.root_parameters + _LAYERS_GATHERED * shape.layer_parameters),
        activations=kept + (layer if checkpoints else 0),
        head=tokens * (4 + 4 * width) * shape.width
        + 4 * min(CHUNK, tokens) * shape.vocabulary * _CHUNK_COPIES
        + 4 * shape.vocabulary * shape.width,
    )


def estimate_of(spec: TrainerSpec, ranks: int, checkpoints: bool) -> MemoryEstimate:
    """Peak bytes of one of ``ranks`` ranks that are made from ``spec``, its critic's included."""
    policy = model_shape(spec.model)
    found = estimate_memory(policy, spec.config, ranks, spec.longest, checkpoints)
    if spec.config.critic is None:
        return found
    shape = model_shape(spec.config.critic.model or spec.model)
    critic = estimate_memory(shape, spec.config, ranks, spec.longest, checkpoints)
    return MemoryEstimate(
        found.state + critic.state,
        found.gathered + critic.gathered,
        max(found.activations, critic.activations),
        max(found.head, critic.head),
    )


def room_of_rank(device_bytes: int, ranks: int, gpus: float) -> int:
    """Bytes that one of ``ranks`` ranks may use: of the GPU that it was given a share of, or of a
    machine that they all are on."""
    share = min(gpus, 1.0) if gpus > 0 else 1 / ranks
    return int(_USABLE * share * device_bytes)


def _layer_bytes(shape: ModelShape, width: int) -> int:
    """What a decoder layer keeps of one token for its backward."""
    norms = 2 * (4 + 2 * width) * shape.width
    if shape.normalizes_heads:
        norms += (4 + width) * (shape.query_width + shape.key_width)
    attention = width * (2 * shape.query_width + 2 * shape.key_width)
    return norms + attention + 4 * width * shape.mlp_width


def _parameter_sizes(model: str) -> Iterator[tuple[str, int]]:
    import safetensors

    for path in sorted(Path(model).glob("*.safetensors")):
        with safetensors.safe_open(path, framework="np") as file:
            handle: Any = file
            for name in handle.keys():  # noqa: SIM118  (no mapping)
                yield name, prod(handle.get_slice(name).get_shape())
