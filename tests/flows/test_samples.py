"""Samples as a person reads them: on the command line, filtered by SQL, as a table to keep."""

import json
import math
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from artifacts.store import Store
from flows.cli import main
from flows.iteration import Iteration, Round
from flows.samples import join_iteration, telling_rows
from small_run import REWARDS, small_plan, small_run, write_iteration, write_rollout


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two iterations; the second holds a reward that failed."""
    store, _ = small_run(small_plan(tmp_path), [1])
    write_iteration(store, 2, [None, *REWARDS[1:]])
    return store


@pytest.fixture
def samples(store, monkeypatch, capsys):
    """``ratchet samples`` on that run: its exit code, output and error."""

    def run(*args: str, columns: int = 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["ratchet", "samples", store.url, *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def test_samples_of_a_run_are_those_of_its_newest_iteration_in_aligned_lines(samples) -> None:
    code, out, _ = samples("--limit", "3", columns=180)
    assert code == 0
    head, *rows, _, last = out.splitlines()
    assert head.split()[:4] == ["reward", "prompt_text", "text", "ground_truth"]
    assert [row.split()[0] for row in rows] == ["-", "1.000", "0.500"]
    assert {row.index("000002-00000-") for row in rows} == {head.index("sample_id")}
    assert last == "iteration 2: 3 of 8 samples"


def test_samples_are_filtered_and_sorted_by_sql(samples) -> None:
    args = ("--iteration", "1", "--where", 'advantage is null or "reward.exact" = 0')
    code, out, _ = samples(*args, "--sort", "sample_id desc", "--json")
    assert code == 0
    ids = [row["sample_id"] for row in json.loads(out)]
    assert ids == ["000001-00001-003", "000001-00000-003", "000001-00000-000"]


def test_samples_as_json_have_every_column_and_stay_json_with_a_nan(store, samples) -> None:
    write_iteration(store, 3, [math.nan, *REWARDS[1:]])
    _, out, _ = samples("--json", "--limit", "1")
    (row,) = json.loads(out, parse_constant=pytest.fail)
    assert row["reward"] is None
    assert row["response_ids"] == [3]
    assert row["logprobs"] == [-0.5]
    assert row["policy_version"] == 2


def test_samples_with_a_wrong_column_end_with_the_columns_there_are(samples) -> None:
    code, _, err = samples("--where", "rewards > 1")
    assert code == 2
    (line,) = err.splitlines()
    assert 'Referenced column "rewards" not found' in line
    assert '"reward.exact", "reward.brief", reward,' in line


def test_samples_of_an_iteration_that_is_not_there_name_the_newest(samples) -> None:
    code, _, err = samples("--iteration", "9")
    assert code == 2
    assert err == "ratchet: iteration 9 has no committed rollout; the newest is 2\n"


def test_samples_too_long_for_a_line_are_blocks_that_show_the_whole_text(store, samples) -> None:
    text = " ".join(f"word{n}" for n in range(60))
    write_iteration(store, 3, [None, *REWARDS[1:]], texts=[text, "first\nsecond", *"345678"])
    _, out, _ = samples("--limit", "2", columns=80)
    assert max(len(line) for line in out.splitlines()) <= 80
    shown = " ".join(out.split())
    assert text in shown
    assert "response first second" in shown
    assert "KeyError" in shown
    assert out.startswith("000003-00000-000  reward -  advantage 0.000  tokens 1")


def test_samples_that_hold_terminal_commands_show_them_and_are_not_obeyed(store, samples) -> None:
    write_iteration(store, 3, texts=["\x1b[2J\x07[bold]", *"2345678"])
    _, out, _ = samples("--limit", "1")
    assert "\x1b" not in out
    assert "\\x1b[2J\\x07[bold]" in out


def test_samples_of_a_rollout_without_scores_are_shown_as_far_as_they_are(store, samples) -> None:
    write_rollout(store, 3, list("abcdefgh"))
    _, out, _ = samples("--limit", "2")
    assert "reward" not in out
    assert [line.split()[1] for line in out.splitlines()[1:3]] == ["a", "b"]


def test_join_of_tables_in_another_order_is_refused(tmp_path: Path) -> None:
    store, made = small_run(small_plan(tmp_path))
    mixed = Iteration([Round(made[1].rounds[0].rollout, made[2].rounds[0].scores)])
    with pytest.raises(ValueError, match="same samples in the same order"):
        join_iteration(store, mixed)


def scored(rewards: list[float | None]) -> pa.Table:
    count = len(rewards)
    return pa.table(
        {
            "sample_id": [f"s{n:03d}" for n in range(count)],
            "text": ["x" * 3000] * count,
            "reward": pa.array(rewards, pa.float64()),
        }
    )


def test_telling_rows_of_many_samples_keep_the_failed_both_ends_and_the_middle() -> None:
    rewards = [n / 100 for n in range(100)]
    table = telling_rows(scored([*reversed(rewards), None]), 5)
    assert [row[0] for row in table["data"]] == [None, 0.24, 0.49, 0.74, 0.99]


def test_telling_rows_of_few_samples_are_all_of_them_with_long_texts_cut() -> None:
    table = telling_rows(scored([1.0, 0.0]), 8)
    assert table["columns"] == ["reward", "text", "sample_id"]
    assert table["data"] == [[0.0, "x" * 2000 + " …", "s001"], [1.0, "x" * 2000 + " …", "s000"]]
