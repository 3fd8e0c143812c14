"""Statistics of a score table, for people."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.schemas import usage_columns
from stages.groups import count_with_spread, groups_with_spread
from stages.score.judge_spec import JudgeSpec
from stages.totals import float_column, total_rewards


def reward_metrics(scores: pa.Table) -> dict[str, float | None]:
    """Of the sum, of each component, and of what is missing, in a table :func:`with_totals`.

    ``reward/mean`` and the like speak of the whole reward, what is given per token included;
    ``reward/<name>`` is a component's mean, unweighted.
    """
    rewards = float_column(scores["total"])
    metrics: dict[str, float | None] = {
        **{f"reward/{name}": value for name, value in statistics(rewards).items()},
        "score/null_share": float(np.isnan(rewards).mean()),
        "score/error_share": 1 - scores["error"].null_count / scores.num_rows,
        "score/zero_spread_share": zero_spread_share(scores["group_id"].to_pylist(), rewards),
    }
    for name in scores.column_names:
        if name.startswith("reward."):
            values, short = float_column(scores[name]), name.removeprefix("reward.")
            found = statistics(values)
            metrics[f"reward/{short}"] = found.pop("mean")
            metrics |= {f"reward/{short}_{each}": value for each, value in found.items()}
            metrics[f"reward/{short}_null_share"] = float(np.isnan(values).mean())
    return metrics


def judge_metrics(scores: pa.Table, judges: Sequence[JudgeSpec]) -> dict[str, float | None]:
    """Tokens that each judge's requests and answers took, and their cost where prices are known.

    What its endpoint counted for no sample is None.
    """
    metrics: dict[str, float | None] = {}
    for spec in judges:
        tokens = [pc.sum(scores[name]).as_py() for name in usage_columns(spec.column)]
        place = f"score/{spec.column}"
        metrics |= {f"{place}/input_tokens": tokens[0], f"{place}/output_tokens": tokens[1]}
        price = spec.price_per_million_tokens
        if price is not None and None not in tokens:
            metrics[f"{place}/cost"] = (
                tokens[0] * price.input + tokens[1] * price.output
            ) / 1_000_000
    return metrics


def with_totals(scores: pa.Table) -> pa.Table:
    """``scores`` with a sample's whole reward as ``total``, in the place of its tokens' rewards."""
    totals = pa.array(total_rewards(scores))
    return scores.drop_columns("token_rewards").append_column("total", totals)


def statistics(values: np.ndarray) -> dict[str, float | None]:
    """Mean, population deviation, least and largest of what is known; None where nothing is."""
    known = values[~np.isnan(values)]
    names = ("mean", "std", "min", "max")
    return {name: float(getattr(known, name)()) if len(known) else None for name in names}


def zero_spread_share(groups: Sequence[str], rewards: np.ndarray) -> float:
    """Share of groups whose known rewards are all equal: they teach nothing."""
    count = len(set(groups))
    return (count - len(groups_with_spread(groups, rewards))) / count


def spread_counts(scores: pa.Table) -> dict[str, int]:
    """How many groups have whole rewards that differ, under each policy for nulls, in a table
    :func:`with_totals`: what tells whether the iteration draws another round."""
    return count_with_spread(scores["group_id"].to_pylist(), float_column(scores["total"]))
