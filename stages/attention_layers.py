"""Which of a model's layers packed attention can't serve, by the model's configuration alone.

``stages/packed.py`` serves causal softmax attention over all of a sequence. Any other layer would
look past a window that nobody applies, or carry a state from one sequence of a row into the next.
Reads no weight and loads no torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_FULL = ("full_attention", "attention")
_SLIDING = "sliding_attention"

# Families whose attention has learned sinks; their configurations have no field that says so.
_WITH_SINKS = (
    "gpt_oss",
    "granite_swa",
    "granitemoe_swa",
    "hy_v4",
    "mimo_v2_flash",
    "deepseek_v4",
    "openai_privacy_filter",
)

# Fields that only models with such layers have, where no list of layers is given.
_MARKS = {
    "linear_num_key_heads": "linear_attention",
    "linear_attn_config": "linear_attention",
    "attention_chunk_size": "chunked_attention",
    "lru_width": "recurrent",
    "conv_L_cache": "conv",
    "state_size": "mamba",
    "ssm_state_size": "mamba",
    "mamba_d_state": "mamba",
    "chunkwise_kernel": "xlstm",
    "attention_hidden_size": "rwkv",
}


def unserved_layers(config: Mapping[str, Any]) -> str | None:
    """The layers of a ``config.json`` that can't be served, by the names that it has for them:
    ``linear_attention in layers 0, 1, 2``. None: all can."""
    config = {**config, **(config.get("text_config") or {})}
    if config.get("model_type") in _WITH_SINKS:
        return f"attention sinks (model_type {config['model_type']})"
    if cap := config.get("attn_logit_softcapping"):
        return f"softcapped attention (attn_logit_softcapping {cap:g})"
    if kinds := config.get("layer_types") or config.get("layers_block_type"):
        return _of_kinds(kinds, config)
    if marks := [name for name in _MARKS if config.get(name)]:
        return f"{_MARKS[marks[0]]} layers ({marks[0]})"
    return _of_window(config)


def _of_kinds(kinds: Sequence[str], config: Mapping[str, Any]) -> str | None:
    served = (*_FULL, _SLIDING) if _spans_context(config) else _FULL
    unserved = next((kind for kind in kinds if kind not in served), None)
    if unserved is None:
        return None
    return f"{unserved} in {_layers([i for i, kind in enumerate(kinds) if kind == unserved])}"


def _of_window(config: Mapping[str, Any]) -> str | None:
    """A window without a list of layers: Qwen2's begins at a layer, Gemma3's and Cohere2's leaves
    out each of a number, Mistral's and Phi3's is in all."""
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", True) or _spans_context(config):
        return None
    what = f"{_SLIDING} (sliding_window {window})"
    layers = range(int(config.get("num_hidden_layers") or 0))
    if config.get("use_sliding_window") and "max_window_layers" in config:
        layers = layers[config["max_window_layers"] :]
        return f"{what} in {_layers(layers)}" if layers else None
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 0:
        return f"{what} in {_layers([i for i in layers if (i + 1) % pattern])}"
    return f"{what} in all layers"


def _spans_context(config: Mapping[str, Any]) -> bool:
    """Whether a window is as long as any sequence, so that it hides nothing."""
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    return bool(window and context and window >= context)


def _layers(numbers: Sequence[int]) -> str:
    first = ", ".join(map(str, numbers[:6]))
    more = f" and {len(numbers) - 6} more" if len(numbers) > 6 else ""
    return f"layer{'s' if len(numbers) > 1 else ''} {first}{more}"
