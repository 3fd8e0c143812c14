"""Kills at random moments, of random processes: the run ends with the bytes it should have."""

import time

import pytest

from kills import Disturber, sample_ids
from launching import digests

pytestmark = pytest.mark.real

KILLS = 4


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
