"""What scrolls by while a run works: a line a stage, and a bar where somebody watches."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flows import report
from flows.report import Report, set_up_logging
from small_run import small_plan, small_run

# One stage of four samples, as a run reports it.
STAGE = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from small_run import small_plan, small_run
from flows.report import Report, set_up_logging
_, made = small_run(small_plan(Path({folder!r})), [1])
set_up_logging()
report = Report()
progress = report.progress("rollout", "1")
progress(total=4)
for _ in range(4):
    progress(samples=1, tokens=10)
    time.sleep(0.15)
report.stage("rollout", "1", made[1].rounds[0].rollout.manifest, False)
report.close()
"""


@pytest.fixture
def lines(capsys):
    """The lines on standard error so far, without their times."""
    set_up_logging()

    def read() -> list[str]:
        shown = capsys.readouterr().err.splitlines()
        assert all(re.match(r"\d\d:\d\d:\d\d \S", line) for line in shown)
        return [line[9:] for line in shown]

    return read


def test_report_of_stages_has_the_same_keys_in_the_same_places(tmp_path: Path, lines) -> None:
    _, made = small_run(small_plan(tmp_path), [1])
    said = Report()
    said.stage("rollout", "1", made[1].rounds[0].rollout.manifest, was_reused=False)
    said.stage("score", "1", made[1].rounds[0].scores.manifest, was_reused=True)
    said.stage("update", "1", made[1].update.manifest, was_reused=False)
    rollout, score, update = lines()
    for key in ("iteration=1 ", "samples=", "seconds="):
        assert rollout.index(key) == score.index(key) == update.index(key)
    assert re.fullmatch(
        r"rollout +iteration=1 +samples=8 +seconds=0\.\d\d +tokens=15 +tokens/s=\d+", rollout
    )
    assert score.endswith("reward=0.594 state=reused")
    assert "samples=7 " in update
    assert update.endswith("loss=0.5 grad_norm=2")


def test_report_to_a_log_says_when_a_stage_starts_and_draws_nothing(lines) -> None:
    progress = Report().progress("score", "3")
    progress(total=8, found=1)
    progress(samples=8, shard=0)
    assert lines() == ["start    stage=score iteration=3   samples=8    shards_found=1"]


def test_report_of_a_long_stage_says_from_time_to_time_how_far_it_is(lines, monkeypatch) -> None:
    monkeypatch.setattr(report, "_BEAT_SECONDS", 0.0)
    progress = Report().progress("rollout", "3")
    progress(total=8)
    progress(samples=2, tokens=20)
    # A shard that commits brings its samples' tokens again; they are counted once.
    progress(shard=0, rows=2, tokens=20)
    last = lines()[-1]
    assert re.match(r"working  stage=rollout iteration=3 +samples=2/8 +tokens=20 ", last)


def test_report_keeps_third_parties_to_what_went_wrong(lines) -> None:
    import logging
    import warnings

    logging.getLogger("alembic.runtime.migration").info("Running upgrade")
    logging.getLogger("mlflow.store.db.utils").info("Creating initial MLflow database tables")
    warnings.warn("deprecated since 1.0", stacklevel=1)
    assert lines() == []


def test_report_on_a_terminal_draws_a_bar_below_whole_lines(tmp_path: Path) -> None:
    code = STAGE.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    ours, theirs = os.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    child = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    # A terminal whose other end has closed reads as an error, not as an end.
    while chunk := _read(ours):
        shown += chunk
    assert child.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"rollout 1 .*━.* [1-3]/4 [\d,]+ tokens/s", text)
    whole_line = r"[\r\n]\d\d:\d\d:\d\d rollout  iteration=1 [^\r]*tokens/s=\d+\r\n"
    assert re.search(whole_line, text)
    assert "start" not in text


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
