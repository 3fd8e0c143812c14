"""``ratchet status``: what is committed, calm at 80 columns, complete as JSON."""

import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from artifacts.manifests import FILE_NAME, read_manifest, write_manifest
from artifacts.store import Store
from flows.cli import main
from flows.iteration import newest
from flows.status import run_status, summary
from small_run import (
    small_plan,
    small_run,
    write_iteration,
    write_rollout,
    write_scores,
    write_snapshot,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two whole iterations with one snapshot, and a third killed while it scored."""
    store, made = small_run(small_plan(tmp_path, iterations=4))
    write_snapshot(store, made[2].update)
    scores = write_scores(store, 3, write_rollout(store, 3, list("abcdefgh")), [1.0] * 8)
    store.remove(f"{scores.folder}/{FILE_NAME}")
    return store


@pytest.fixture
def status(monkeypatch, capsys):
    """``ratchet status`` at 80 columns: exit code, output, error."""

    def run(*args: str):
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "argv", ["ratchet", "status", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def test_status_shows_an_iteration_a_line_that_fits_80_columns(store, status) -> None:
    code, out, _ = status(store.url)
    assert code == 0
    head, first, second, third, _, ending, kept = out.splitlines()
    names = ["iteration", "reward", "samples", "trained", "tokens", "rollout", "score", "update"]
    assert head.split() == [*names, "policy"]
    assert max(map(len, (head, first, second, third))) <= 80
    assert first.split()[:5] == ["1", "0.594", "8", "7", "15"]
    assert second.split()[-1] == "kept"
    assert "2 of 2" in third
    assert ending == f"2 of 4 iterations finished: {store.url}"
    assert kept == "policies kept: 2"


def test_status_as_json_has_every_stage_with_its_facts(store, status) -> None:
    _, out, _ = status(store.url, "--json")
    found = json.loads(out)
    assert (found["finished_iterations"], found["is_complete"]) == (2, False)
    assert found["snapshots"] == [2]
    rows = {(row["iteration"], row["stage"]): row for row in found["stages"]}
    assert len(rows) == 8
    partial = rows[3, "score"]
    assert (partial["state"], partial["shards"], partial["of"]) == ("partial", 2, 2)
    assert partial["attempts"] == 1
    assert partial["who"] == f"{socket.gethostname()}:{os.getpid()}"
    assert rows[1, "update"]["who"] == partial["who"]
    assert rows[1, "update"]["samples"] == 7
    assert rows[2, "update"]["weights_digest"] == f"{2:064x}"
    manifest = read_manifest(store, rows[1, "rollout"]["folder"])
    assert rows[1, "rollout"]["digest"] == manifest.digest
    assert (rows[1, "rollout"]["made"], rows[1, "rollout"]["found"]) == (2, 0)


def test_status_of_a_long_run_that_is_piped_shows_every_iteration(tmp_path: Path, status) -> None:
    store, _ = small_run(small_plan(tmp_path, iterations=40), range(1, 41))
    _, out, _ = status(store.url)
    assert [line.split()[0] for line in out.splitlines()[1:41]] == [str(n) for n in range(1, 41)]


def test_status_of_a_run_that_has_just_started_says_so(tmp_path: Path, status) -> None:
    store, _ = small_run(small_plan(tmp_path), [])
    code, out, _ = status(store.url)
    assert code == 0
    assert "0 of 2 iterations finished" in out
    assert "no policy is kept yet" in out


def test_status_of_no_run_ends_with_one_sentence(tmp_path: Path, status) -> None:
    code, _, err = status(str(tmp_path))
    assert code == 2
    assert (
        err
        == f"ratchet: there is no run at '{tmp_path}': give the folder or URL that holds run.json\n"
    )


def test_newest_of_two_commits_of_a_stage_is_the_later_one(tmp_path: Path) -> None:
    store, made = small_run(small_plan(tmp_path), [1])
    scores = made[1].rounds[0].scores
    for key, later in (("0" * 16, 10.0), ("f" * 16, -10.0)):
        provenance = {**scores.manifest.provenance}
        provenance["end"] += later
        manifest = replace(scores.manifest, key=key, provenance=provenance)
        write_manifest(store, f"iteration-000001/score/{key}", manifest)
    folder, _ = newest(store, 1, "score")
    assert folder == f"iteration-000001/score/{'0' * 16}"


def test_summary_of_a_run_gives_the_numbers_and_commands_that_work_on_it(tmp_path: Path) -> None:
    store, _ = small_run(small_plan(tmp_path / "a folder"))
    write_iteration(store, 3, [1.0] * 8)
    text = summary(run_status(store.url))
    assert "complete: all 3 iterations" in text
    assert "reward: 0.594 → 1.000" in text
    assert f"ratchet status  '{store.url}'" in text
    assert "mlflow" not in text


@pytest.mark.parametrize(
    ("uri", "page"),
    [
        ("sqlite:////runs/mlflow.db", "http://127.0.0.1:5000/#/experiments/7/runs/abc"),
        ("http://tracking:8080", "http://tracking:8080/#/experiments/7/runs/abc"),
    ],
)
def test_summary_of_a_tracked_run_leads_to_its_page(tmp_path: Path, uri: str, page: str) -> None:
    store, _ = small_run(small_plan(tmp_path))
    record = {"uri": uri, "experiment_id": "7", "run_id": "abc"}
    store.create("tracking.json", json.dumps(record).encode())
    text = summary(run_status(store.url))
    assert page in text
    assert (f"mlflow server --workers 1 --backend-store-uri {uri}" in text) == ("sqlite" in uri)
