"""What ``update.algorithm`` stands for: the fields of ``update`` that each algorithm sets.

A field that the user sets wins; one that neither sets has the default of ``config.py``. A new
preset is a row here.
"""

from collections.abc import Mapping
from typing import Any

DEFAULT = "grpo"

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv:2402.03300, as it is run today: tokens weigh the same, and no KL. The
    # paper's own is loss_aggregation sequence_mean with kl_coef 0.04.
    "grpo": {"advantage": "grpo", "loss_aggregation": "token_mean"},
    # Understanding R1-Zero-Like Training, arXiv:2503.20783: no division by deviation or length.
    "dr_grpo": {"advantage": "dr_grpo", "loss_aggregation": "fixed_length"},
    # DAPO, arXiv:2503.14476: clip-higher, token mean, dynamic sampling, soft overlong punishment
    # over the last fifth of the length (4,096 of 20,480 tokens there), no KL.
    "dapo": {
        "advantage": "grpo",
        "loss_aggregation": "token_mean",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "kl_coef": 0.0,
        "overlong_buffer_tokens": None,
        "overlong_penalty": 1.0,
        "zero_spread": "drop",
    },
    # Group Sequence Policy Optimization, arXiv:2507.18071, section 5.1.
    "gspo": {
        "advantage": "grpo",
        "loss": "gspo",
        "loss_aggregation": "sequence_mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    # MiniMax-M1, arXiv:2506.13585, section 3.1: no floor. It gives no ceiling; that of 5 is from
    # The Art of Scaling RL Compute, arXiv:2510.13786.
    "cispo": {
        "advantage": "grpo",
        "loss": "cispo",
        "loss_aggregation": "token_mean",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "kl_coef": 0.0,
    },
    # Geometric-Mean Policy Optimization, arXiv:2507.20673: log-ratios from -0.4 to 0.4.
    "gmpo": {
        "advantage": "grpo",
        "loss": "gmpo",
        "loss_aggregation": "sequence_mean",
        "clip_low": 0.4,
        "clip_high": 0.4,
    },
    # Soft Adaptive Policy Optimization, arXiv:2511.20347.
    "sapo": {"advantage": "grpo", "loss": "sapo", "loss_aggregation": "sequence_mean"},
    # Back to Basics, arXiv:2402.14740: the response is one action, so its log-prob is a sum; the
    # KL is in the reward.
    "rloo": {
        "advantage": "rloo",
        "loss": "reinforce",
        "loss_aggregation": "sequence_sum",
        "reward_kl_coef": 0.05,
    },
    # REINFORCE++, arXiv:2501.03262: the KL is in the reward, token by token.
    "reinforce_pp": {
        "advantage": "reinforce_pp",
        "loss_aggregation": "token_mean",
        "reward_kl_coef": 0.01,
        "gamma": 1.0,
    },
    # The same paper's variant with a group baseline: the KL is in the loss, as k2.
    "reinforce_pp_baseline": {
        "advantage": "reinforce_pp_baseline",
        "loss_aggregation": "token_mean",
        "kl_coef": 0.001,
        "kl_estimator": "k2",
    },
    # On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585: plain policy gradient, no KL.
    "opo": {
        "advantage": "opo",
        "loss": "reinforce",
        "loss_aggregation": "token_mean",
        "kl_coef": 0.0,
        "entropy_coef": 0.0,
    },
    # Direct Preference Optimization, arXiv:2305.18290: pairs of scored groups, or of the data.
    "dpo": {"loss": "dpo"},
    # IPO, arXiv:2310.12036: the same pairs, with a margin to reach and not to pass.
    "ipo": {"loss": "ipo"},
    # GDPO, arXiv:2601.05242.
    "gdpo": {"advantage": "gdpo", "loss_aggregation": "token_mean"},
    # PPO, arXiv:1707.06347, as in InstructGPT, arXiv:2203.02155: a critic; the KL is in the reward.
    "ppo": {
        "advantage": "gae",
        "critic": {},
        "loss_aggregation": "token_mean",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "reward_kl_coef": 0.05,
        "gamma": 1.0,
        "gae_lambda": 0.95,
    },
}


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` of an update section, and what its algorithm sets beside them."""
    return {**_preset_of(values), **values}


def preset_rows(values: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """For each field that the algorithm sets: its name, its value, and who set it."""
    name = f"update.algorithm {values['algorithm']}"
    rows = []
    for key, preset in _preset_of(values).items():
        is_as_set = _holds(values[key], preset)
        by = f"set by {name}" if is_as_set else f"yours; {name} sets {_text(preset)}"
        rows.append((f"update.{key}", _text(values[key]), by))
    return rows


def _preset_of(values: Mapping[str, Any]) -> dict[str, Any]:
    # A name that is none is for the field itself to refuse.
    return PRESETS.get(str(values.get("algorithm", DEFAULT)), {})


def _holds(value: Any, preset: Any) -> bool:
    """Whether ``value`` is what the preset sets; of a section, in the fields that it sets."""
    if isinstance(value, dict) and isinstance(preset, dict):
        return all(value[name] == field for name, field in preset.items())
    return bool(value == preset)


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(field)}" for name, field in value.items()) or "a section"
    return f"{value:g}" if isinstance(value, float) else str(value)
