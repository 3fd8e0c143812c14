"""A preset fills what the user leaves open, and nothing else."""

import pytest

from artifacts.keys import key_of
from stages.settings import Section
from stages.update.config import UpdateConfig
from stages.update.presets import PRESETS, preset_rows, with_preset

NAMES = sorted(PRESETS)


@pytest.mark.parametrize("name", NAMES)
def test_preset_fills_every_field_that_it_names(name):
    config = UpdateConfig(algorithm=name)
    assert {field: given(getattr(config, field)) for field in PRESETS[name]} == PRESETS[name]


def given(value):
    """A section as what is set in it."""
    return value.model_dump(exclude_defaults=True) if isinstance(value, Section) else value


@pytest.mark.parametrize("name", NAMES)
def test_config_of_a_preset_written_out_is_that_of_its_name(name):
    config = UpdateConfig(algorithm=name)
    assert UpdateConfig(**config.model_dump()).model_dump() == config.model_dump()
    written = UpdateConfig(**{**PRESETS[name], "algorithm": "grpo"})
    # Of the fields that grpo names and this one doesn't, none differs from its default.
    assert key_of(written.identity()) == key_of(config.identity())


def test_explicit_field_wins_over_the_preset():
    config = UpdateConfig(algorithm="dapo", clip_high=0.25, zero_spread="keep")
    assert (config.clip_high, config.zero_spread, config.overlong_buffer_tokens) == (
        0.25,
        "keep",
        None,
    )


def test_explicit_default_wins_over_the_preset():
    assert UpdateConfig(algorithm="reinforce_pp", reward_kl_coef=0.0).reward_kl_coef == 0


def test_preset_rows_say_who_set_what():
    values = UpdateConfig(algorithm="dapo", clip_high=0.25).model_dump()
    rows = {name: (value, by) for name, value, by in preset_rows(values)}
    assert rows["update.zero_spread"] == ("drop", "set by update.algorithm dapo")
    assert rows["update.clip_high"] == ("0.25", "yours; update.algorithm dapo sets 0.28")
    assert rows["update.overlong_buffer_tokens"] == ("null", "set by update.algorithm dapo")


def test_another_algorithm_over_a_recorded_config_keeps_what_the_user_had_set():
    recorded = UpdateConfig(algorithm="dapo", clip_low=0.1, lr=0.5)
    assert recorded.own_values() == {"clip_low": 0.1, "lr": 0.5}
    changed = UpdateConfig(**recorded.own_values(), algorithm="reinforce_pp")
    assert (changed.clip_low, changed.lr) == (0.1, 0.5)
    expected = UpdateConfig(algorithm="reinforce_pp", clip_low=0.1, lr=0.5)
    assert changed.model_dump() == expected.model_dump()


def test_with_preset_of_no_known_algorithm_adds_nothing():
    assert with_preset({"algorithm": "gppo", "lr": 1.0}) == {"algorithm": "gppo", "lr": 1.0}
