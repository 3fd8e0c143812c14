"""Metrics over rounds are those of all samples together: held against one table of all of them."""

import numpy as np
import pyarrow as pa
import pytest

from artifacts.manifests import Manifest, Shard
from artifacts.round_metrics import over_rounds
from artifacts.schemas import scores_schema
from stages.score.metrics import reward_metrics, with_totals


def scores(rewards, first):
    """A score table of groups of two; the component is the reward, in another unit."""
    rows = [
        {
            "sample_id": f"s{first + n}",
            "group_id": f"g{(first + n) // 2}",
            # Known where the sum is not, too, as another component failed.
            "reward.best_max": None if n == 4 else 10 * (reward or 0.0),
            "reward": reward,
            "error": "[]" if reward is None else None,
        }
        for n, reward in enumerate(rewards)
    ]
    return pa.Table.from_pylist(rows, schema=scores_schema(["best_max"]))


def manifest(table):
    identity = {"rewards": [{"column": "best_max", "weight": 1.0}]}
    shards = (Shard("shard", table.num_rows, 1, "0"),)
    metrics = reward_metrics(with_totals(table))
    return Manifest("scores", "score", 1, "0", identity, {}, {}, shards, metrics=metrics)


ROUNDS = ([1.0, 0.0, None, 0.25, 1.0, 1.0], [-2.0, 3.0], [None, None], [0.5, 0.5, 0.5, None])


def test_reward_metrics_over_rounds_are_those_of_one_table_of_all_samples():
    firsts = np.cumsum([0, *map(len, ROUNDS)])
    tables = [scores(rewards, int(first)) for rewards, first in zip(ROUNDS, firsts, strict=False)]
    found = over_rounds([manifest(table) for table in tables])
    expected = reward_metrics(with_totals(pa.concat_tables(tables)))
    assert found.keys() == expected.keys()
    # The component is called best_max, and is a mean like any other.
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-14), name


def test_metrics_that_no_round_knows_stay_unknown_and_those_of_one_round_stay_as_they_are():
    (null,) = (manifest(scores([None, None], 0)),)
    assert over_rounds([null, null])["reward/mean"] is None
    one = manifest(scores([0.1, 0.7], 0))
    assert over_rounds([one]) == one.metrics
