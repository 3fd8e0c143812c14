"""Models with layers that packed attention can't serve: told from their configuration, by name.

Which layer is of which kind is held against what transformers itself makes of the configuration.
"""

import json

import pytest
import transformers

from stages.attention_layers import unserved_layers
from stages.models import load_causal_lm, load_value_model, read_config

CONFIGS = {
    "gemma3_text": {"num_hidden_layers": 7, "sliding_window": 64},
    "cohere2": {"num_hidden_layers": 5, "sliding_window": 64},
    "qwen2": {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3_next": {"num_hidden_layers": 9},
    "llama4_text": {"num_hidden_layers": 5},
    "lfm2": {"num_hidden_layers": 6, "full_attn_idxs": [2, 5]},
    "granitemoehybrid": {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
}


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_of_another_kind_are_named_with_their_numbers(family):
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family])
    kinds = config.layer_types
    first = next(kind for kind in kinds if kind not in ("full_attention", "attention"))
    numbers = [i for i, kind in enumerate(kinds) if kind == first]
    assert 0 < len(numbers) < len(kinds)
    found = unserved_layers(config.to_dict())
    assert found.startswith(f"{first} in layer")
    assert f" {', '.join(map(str, numbers[:6]))}" in found
    assert found.endswith(f"and {len(numbers) - 6} more") == (len(numbers) > 6)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"sliding_window": 64}, "sliding_attention (sliding_window 64) in all layers"),
        (
            {"sliding_window": 64, "num_hidden_layers": 7, "sliding_window_pattern": 3},
            "sliding_attention (sliding_window 64) in layers 0, 1, 3, 4, 6",
        ),
        (
            {
                "sliding_window": 64,
                "num_hidden_layers": 3,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            "sliding_attention (sliding_window 64) in layer 2",
        ),
        ({"model_type": "gpt_oss"}, "attention sinks (model_type gpt_oss)"),
        ({"attn_logit_softcapping": 50.0}, "softcapped attention (attn_logit_softcapping 50)"),
        ({"linear_num_key_heads": 16}, "linear_attention layers (linear_num_key_heads)"),
        ({"text_config": {"attention_chunk_size": 8}}, "chunked_attention layers (attention_ch"),
    ],
)
def test_layers_are_found_in_a_file_that_lists_no_layers(config, found):
    assert unserved_layers(config).startswith(found)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"sliding_window": None},
        # Qwen2's own, which it does not apply.
        {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 2},
        {
            "sliding_window": 64,
            "use_sliding_window": True,
            "num_hidden_layers": 2,
            "max_window_layers": 2,
        },
        # As long as any sequence, so that it hides nothing: Phi's.
        {"sliding_window": 512, "max_position_embeddings": 512},
        # Layers of attention alone, of a family that has others too.
        {"layer_types": ["attention"] * 2, "mamba_d_state": 256},
    ],
)
def test_plain_attention_in_every_layer_is_served(config):
    assert unserved_layers(config) is None


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "granite", "smollm3"])
def test_families_of_plain_attention_are_served(family):
    assert unserved_layers(transformers.AutoConfig.for_model(family).to_dict()) is None


@pytest.mark.parametrize("load", [lambda folder: load_causal_lm(folder, None), load_value_model])
def test_layers_that_only_the_family_knows_are_refused_before_a_weight_is_read(load, tmp_path):
    config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))  # without the default window, 4096
    read_config(str(tmp_path))
    with pytest.raises(ValueError, match=r"has sliding_attention \(sliding_window 4096\)"):
        load(str(tmp_path))


@pytest.mark.parametrize("load", [lambda folder: load_causal_lm(folder, None), load_value_model])
def test_family_whose_attention_is_its_own_is_refused_before_a_weight_is_read(load, tmp_path):
    config = {"model_type": "bloom", "architectures": ["BloomForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"is a Bloom.*, whose attention does not go through"):
        load(str(tmp_path))
