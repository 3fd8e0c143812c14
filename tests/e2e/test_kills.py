"""Kills at random moments, of random processes: the run ends with the bytes it should have."""

import json
import time

import pytest

from kills import Disturber, sample_ids
from launching import digests

pytestmark = pytest.mark.real

KILLS = 3


@pytest.fixture(scope="module")
def undisturbed(bench):
    """An undisturbed run, and how long it took."""
    start = time.monotonic()
    bench.cli("train", "run.yaml", "--run", "quiet")
    return bench.url("quiet"), time.monotonic() - start


def test_run_killed_at_random_ends_with_the_bytes_of_one_that_was_not(bench, undisturbed):
    whole, seconds = undisturbed
    seed = time.time_ns() % 2**32
    found = Disturber(bench, "disturbed", seed, seconds).disturb(KILLS)
    told = f"seed {seed}: {found}"
    url = bench.url("disturbed")
    assert digests(url) == digests(whole), told
    ids = sample_ids(url)
    assert ids == sample_ids(whole), told
    assert len(set(ids)) == len(ids), told
    assert found.rewritten == [], told
    # One curve, and nothing left that looks as if it were running.
    client, record = tracked(url)
    assert [run.info.run_id for run in runs_named(client, record, "disturbed")] == [
        record["run_id"]
    ]
    assert client.get_run(record["run_id"]).info.status == "FINISHED"
    for name in ("reward/mean", "update/loss", "rollout/response_tokens"):
        points = client.get_metric_history(record["run_id"], name)
        assert [point.step for point in points] == [1, 2, 3], told


def tracked(url):
    """A client of the server that the run is tracked at, and where it is there."""
    from mlflow import MlflowClient

    record = json.loads((url / "tracking.json").read_text())
    return MlflowClient(tracking_uri=record["uri"]), record


def runs_named(client, record, name):
    runs = client.search_runs([record["experiment_id"]])
    return [run for run in runs if run.info.run_name == name]
