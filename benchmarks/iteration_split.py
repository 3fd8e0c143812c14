"""Where the seconds of an iteration go, read from a finished run's manifests and ledgers.

    python benchmarks/iteration_split.py runs/sort [--warm 3]

Work is what the stages spend in sampling, in reward functions and in the optimizer steps. The
rest of the wall time between two iterations' starts is overhead: orchestration, storage, digests,
hand-over, tracking. Medians over the iterations after the first ``--warm``.
"""

import argparse
from itertools import pairwise
from statistics import median
from typing import Any

from artifacts.runs import committed, iterations
from artifacts.store import Store
from stages.ledger import read_ledger

STAGES = ("rollout", "score", "update")


def iteration_rows(store: Store) -> list[dict[str, float]]:
    """One row an iteration, seconds by part; the last has no successor and is left out."""
    made = [_manifests(store, i) for i in iterations(store)]
    rows = []
    for now, after in pairwise(made):
        wall = after["rollout"][1].provenance["start"] - now["rollout"][1].provenance["start"]
        parts = {stage: now[stage][1].provenance["seconds"] for stage in STAGES}
        work = {
            "sampling": _ledger_seconds(store, *now["rollout"]),
            "rewards": _ledger_seconds(store, *now["score"]),
            "optimizer steps": now["update"][1].provenance["phases"]["steps"],
        }
        tokens = now["rollout"][1].metrics["rollout/response_tokens"] or 0
        rows.append(
            {
                "iteration": wall,
                **{f"stage {name}": seconds for name, seconds in parts.items()},
                **work,
                "overhead": wall - sum(work.values()),
                "tokens/s sampled": tokens / work["sampling"],
            }
        )
    return rows


def _manifests(store: Store, iteration: int) -> dict[str, Any]:
    return {stage: committed(store, iteration, stage)[-1] for stage in STAGES}


def _ledger_seconds(store: Store, folder: str, manifest: Any) -> float:
    """From the first unit's start to the last unit's end."""
    entries = read_ledger(store, folder, manifest.provenance["ledger"])
    start = min(entry["start"] for entry in entries)
    return max(entry["start"] + entry["seconds"] for entry in entries) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--warm", type=int, default=3)
    args = parser.parse_args()
    rows = iteration_rows(Store(args.run))[args.warm :]
    print(f"{len(rows)} iterations of {args.run}, the first {args.warm} left out\n")
    print("| part | median s | share |")
    print("|---|---|---|")
    wall = median(row["iteration"] for row in rows)
    for name in rows[0]:
        value = median(row[name] for row in rows)
        share = "" if "tokens" in name else f"{value / wall:.0%}"
        print(f"| {name} | {value:,.3f} | {share} |")


if __name__ == "__main__":
    main()
