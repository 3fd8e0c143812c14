"""What is published is what MLflow takes: held against MLflow's own validation."""

import json

from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name, _validate_tag

from flows.publication import description, legal_name, params_of, renamed, table_tag
from small_run import small_plan


@given(st.sets(st.text(max_size=270), min_size=2, max_size=6))
def test_legal_names_of_any_texts_are_legal_and_differ(names: set[str]) -> None:
    legal = {legal_name(name) for name in names}
    assert len(legal) == len(names)
    for name in legal:
        _validate_metric_name(name)
    for name, meant in renamed(names).items():
        _validate_tag(f"ratchet.metric.{name}", meant)


def test_table_tag_of_a_long_run_fits_and_names_the_newest() -> None:
    value = table_tag(123456, "samples/iteration-{:06d}.json")
    _validate_tag("mlflow.loggedArtifacts", value)
    paths = [entry["path"] for entry in json.loads(value)]
    assert len(value) <= 8000
    assert len(paths) > 100
    assert paths[-1] == "samples/iteration-123456.json"


def test_params_of_a_plan_hold_every_setting_under_its_dotted_name(tmp_path) -> None:
    params = params_of(small_plan(tmp_path, samples=3))
    assert params["tracking.samples"] == "3"
    assert params["data.path"] == "prompts/sums.jsonl"
    assert params["score.rewards.0.fn"] == "rewards.py:exact"
    assert params["rollout.stop"] == "[]"
    assert params["tracking.uri"] == "null"


def test_description_of_a_run_holds_commands_that_a_shell_can_take(tmp_path) -> None:
    text = description(small_plan(tmp_path), "/runs/my run")
    assert "ratchet samples '/runs/my run' --iteration 1" in text
    assert "2 iterations of 2 prompts × 4 samples" in text
    assert "`exact` × 1, `brief` × 1" in text
