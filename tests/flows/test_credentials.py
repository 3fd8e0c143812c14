"""Credentials are in nothing that a run writes or prints, and no configuration may hold any."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from child import start_child
from flows.cli import main
from flows.config import UserError, load_config, make_config
from stages.score.outcomes import failed

PASSWORD = "hunter2-Xy/z=="
CONFIG: dict[str, Any] = {
    "model": "model",
    "iterations": 1,
    "data": {"path": "rows.jsonl"},
    "score": {"rewards": [{"fn": "rewards.py:exact"}]},
}
URL = f"s3://AKIAEXAMPLE:{PASSWORD}@bucket/runs"
SIGNED = f"https://example.com/rows.jsonl?X-Amz-Signature={PASSWORD}"


@pytest.mark.parametrize(
    ("override", "field"),
    [
        (f"store={URL}", "store"),
        (f"model={URL}", "model"),
        (f"data.path={SIGNED}", "data.path"),
        (f"tracking.uri=postgresql://me:{PASSWORD}@db/mlflow", "tracking.uri"),
        (f"resources.ray_address=ray://me:{PASSWORD}@head:10001", "resources.ray_address"),
    ],
)
def test_config_with_credentials_in_a_url_is_refused_by_field_without_repeating_them(
    override: str, field: str
) -> None:
    with pytest.raises(UserError) as caught:
        make_config(CONFIG, [override], "run.yaml")
    assert str(caught.value).startswith(f"run.yaml: {field} holds a URL with a password")
    assert PASSWORD not in str(caught.value)


def test_config_with_credentials_in_a_data_source_is_refused() -> None:
    values = {**CONFIG, "data": {"sources": [{"path": "rows.jsonl"}, {"path": SIGNED}]}}
    with pytest.raises(UserError, match=r"data\.sources\.1\.path holds a URL") as caught:
        make_config(values, [], "run.yaml")
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"store: {URL}\nmodel: [",
        f'store: "{URL}" : x',
        yaml.safe_dump({**CONFIG, "data": URL}),
        yaml.safe_dump({**CONFIG, "iterations": URL}),
        yaml.safe_dump({**CONFIG, "sotre": URL}),
    ],
)
def test_config_that_is_wrong_elsewhere_is_refused_without_its_credentials(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(str(tmp_path / "run.yaml"))
    assert PASSWORD not in str(caught.value)


def test_override_that_is_wrong_is_refused_without_its_credentials() -> None:
    for override in (URL, f"store.deep={URL}", f"={URL}"):
        with pytest.raises(UserError) as caught:
            make_config({**CONFIG, "store": "runs"}, [override], "run.yaml")
        assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("command", ["status", "verify", "resume"])
def test_command_on_a_url_with_credentials_exits_two_without_repeating_them(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ratchet", command, f"{URL}/first"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = "".join(capsys.readouterr())
    assert ended.value.code == 2
    assert "credentials by the environment" in printed
    assert PASSWORD not in printed
    assert "Traceback" not in printed


# Its reward tells what it should keep to itself, as clients of paid services do in their errors.
REWARD = """
import os
def share(text, sample_id, **row):
    if sample_id.endswith("0"):
        return 1.0
    key, password = os.environ["JUDGE_API_KEY"], "pw" * 5
    raise PermissionError(f"401 for key {key} at https://x:{password}@judge")
"""
TRAIN = """
import sys
from pathlib import Path
from artifacts.store import Store
from flows.publication import params_of, tags_of
from flows.report import Report, set_up_logging
import plain_run
set_up_logging()
folder = Path(sys.argv[1])
plan = plain_run.plain_plan(folder)
store = Store(str(folder / "run"))
session = plain_run.begin(store, plan)
session.report = Report()
session.rollout(1)
made = session.score(1)
session.report.stage("score", 1, made.manifest, made.was_reused)
print(params_of(plan), tags_of(plan, store.url))
Store(f"{folder}/run/iteration-000001/score/x").read("y")
"""


def test_stage_in_an_environment_full_of_secrets_writes_and_prints_none_of_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "plain_rewards.py").write_text(REWARD)
    secrets = {
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG",
        "AWS_SESSION_TOKEN": "FwoGZXIvYXdzEBYaDH",
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0LWtleS1vZi1henVyZQ",
        "JUDGE_API_KEY": "sk-judge-0123456789",
        "MLFLOW_TRACKING_PASSWORD": "mlflow-password",
        "HF_TOKEN": "hf_0123456789abcdef",
    }
    tests = str(Path(__file__).parent.parent)
    child = start_child(TRAIN, tmp_path, PYTHONPATH=f"{Path(tests).parent}:{tests}", **secrets)
    output, errors = child.communicate()
    assert "FileNotFoundError" in errors  # the last line's: a traceback counts too
    assert "score" in errors + output
    written = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert any(path.name == "manifest.json" and "score" in str(path) for path in written)
    told = {**written, Path("printed"): (output + errors).encode()}
    for secret in [*secrets.values(), "pw" * 5]:
        assert [path for path, data in told.items() if secret.encode() in data] == []


def test_failure_of_a_reward_keeps_what_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-judge-0123456789")
    error = PermissionError("401 for key sk-judge-0123456789 at https://x:secret@judge/v1")
    failure = failed(error).failure
    assert failure is not None
    assert failure.message == "401 for key *** at https://***@judge/v1"
