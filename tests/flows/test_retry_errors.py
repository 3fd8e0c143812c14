"""``ratchet stage score --retry-errors`` on a run: what a service's outage cost comes back."""

import json
import sys
from pathlib import Path

import pytest

from flows.cli import main
from stages.contract import StageError
from tiny_run import session

REWARDS = """
from pathlib import Path


def flaky(text, sample_id, **row):
    if sample_id.endswith("-001") and not Path("well").exists():
        raise ConnectionError("the service is down")
    return float(len(text))
"""


@pytest.fixture
def ratchet(monkeypatch, capsys):
    def run(*args: str):
        monkeypatch.setattr(sys, "argv", ["ratchet", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def test_errors_of_a_run_are_shown_and_retried_until_it_has_trained_on_them(
    folder: Path, ratchet
) -> None:
    (folder / "rewards.py").write_text(REWARDS)
    overrides = ["score.rewards=[{fn: 'rewards.py:flaky'}]", "iterations=2"]
    with session(*overrides) as made:
        made.rollout(1)
        before = made.score(1)
    failed = ("samples", "runs/whole", "--where", "error is not null", "--json")
    rows = json.loads(ratchet(*failed)[1])
    assert {row["sample_index"] for row in rows} == {1}
    assert json.loads(rows[0]["error"])[0]["message"] == "the service is down"

    (folder / "well").touch()
    again = ("stage", "score", "runs/whole", "--iteration", "1", "--retry-errors", "--debug")
    code, out, _ = ratchet(*again)
    assert (code, out.split(":")[0]) == (0, "score 1")
    assert json.loads(ratchet(*failed)[1]) == []
    assert ratchet("verify", "runs/whole")[0] == 0

    # What trains next takes the retry, and is found by it afterwards.
    with session(*overrides) as made:
        made.recall(1)
        retried = made.score(1)
        assert retried.manifest.inputs["retry_of"].digest == before.manifest.digest
        update = made.update(1)
        assert update.manifest.inputs["scores"].digest == retried.manifest.digest
    with session(*overrides) as made:
        assert made.recall(1).update.manifest.digest == update.manifest.digest
        with pytest.raises(StageError, match="iteration 1 has been trained on as it was scored"):
            made.retry_errors(1)


def test_retry_of_errors_is_of_score_alone(folder: Path, ratchet) -> None:
    code, _, err = ratchet(
        "stage", "rollout", "runs/whole", "--iteration", "1", "--retry-errors", "--debug"
    )
    assert code == 2
    assert "--retry-errors is of score, and the stage is rollout" in err
