"""What is committed of a run, read from manifests alone."""

import json
import shlex
import sys
from collections.abc import Iterable
from typing import Any

from artifacts.attempts import read_attempts
from artifacts.branches import open_store
from artifacts.manifests import Manifest
from artifacts.runs import committed, is_committed, iterations, read_record
from artifacts.store import Store
from artifacts.tombstones import is_retired
from flows.config import UserError
from flows.plan import Plan
from flows.revisions import plan_at, read_revisions
from flows.tables import print_table

TRACKING_RECORD = "tracking.json"
STAGES = ("rollout", "score", "update")
_SHOWN_FIRST, _SHOWN_LAST = 5, 30
_LOCAL_SERVER = "http://127.0.0.1:5000"


def run_status(url: str) -> dict[str, Any]:
    """The run's state, as JSON values."""
    store = open_store(url)
    record = read_record(store)
    if record is None:
        raise UserError(f"there is no run at {url!r}: give the folder or URL that holds run.json")
    revisions = read_revisions(store)
    rows = [
        _stage_row(store, plan_at(revisions, i), i, stage)
        for i in iterations(store)
        for stage in STAGES
    ]
    planned = revisions[-1].plan.config.iterations
    updates = sum(row["stage"] == "update" and row["state"] == "committed" for row in rows)
    return {
        "run": url,
        "planned_iterations": planned,
        "finished_iterations": updates,
        "is_complete": updates >= planned,
        "snapshots": snapshots(store),
        "tracking": tracking_record(store),
        "stages": [row for row in rows if row["state"] != "absent"],
    }


def newest(store: Store, iteration: int, stage: str) -> tuple[str, Manifest] | None:
    """Folder and manifest of the stage's latest commit in ``iteration``.

    Where there are several, one whose files ``ratchet gc`` retired comes last.
    """
    found = committed(store, iteration, stage)
    if len(found) > 1:
        found = [pair for pair in found if not is_retired(store, pair[0])] or found
    return max(found, key=lambda pair: pair[1].provenance.get("end", 0.0)) if found else None


def snapshots(store: Store) -> list[int]:
    """The policy versions whose weights and trainer state are kept."""
    return [
        int(version)
        for version in store.names("policy")
        if version.isdecimal()
        and any(
            is_committed(store, folder) and not is_retired(store, folder)
            for folder in (f"policy/{version}/{key}" for key in store.names(f"policy/{version}"))
        )
    ]


def tracking_record(store: Store) -> dict[str, Any] | None:
    """Where the run is tracked: the server's URI, the experiment's and the run's id."""
    try:
        return dict(json.loads(store.read(TRACKING_RECORD)))
    except FileNotFoundError:
        return None


def _stage_row(store: Store, plan: Plan, iteration: int, stage: str) -> dict[str, Any]:
    row: dict[str, Any] = {"iteration": iteration, "stage": stage, "state": "absent"}
    if found := newest(store, iteration, stage):
        folder, manifest = found
        kept = {"folder": folder, "is_retired": is_retired(store, folder)}
        return row | {"state": "committed", **kept, **_facts(manifest)}
    parent = f"iteration-{iteration:06d}/{stage}"
    begun = [f"{parent}/{name}" for name in store.names(parent)]
    if not begun:
        return row
    # Of several keys' folders, the one that was begun last.
    tries = {folder: read_attempts(store, folder) for folder in begun}
    folder = max(begun, key=lambda f: max((a["start"] for a in tries[f]), default=0.0))
    shards = [name for name in store.names(folder) if name.endswith(".arrow")]
    last = tries[folder][-1] if tries[folder] else {}
    return row | {
        "state": "partial",
        "folder": folder,
        "shards": sum(not name.startswith("ledger.") for name in shards),
        "of": _num_shards(store, plan, iteration, stage),
        "attempts": len(tries[folder]),
        "who": f"{last['host']}:{last['pid']}" if last else None,
        "start": last.get("start"),
    }


def _num_shards(store: Store, plan: Plan, iteration: int, stage: str) -> int | None:
    """Shards that the stage's output will have; None where that is not known beforehand."""
    if stage == "rollout":
        return -(-plan.config.data.batch_size // plan.config.rollout.prompts_per_shard)
    if stage == "score" and (rollout := newest(store, iteration, "rollout")):
        return len(rollout[1].shards)
    return None


def _facts(manifest: Manifest) -> dict[str, Any]:
    provenance, metrics = manifest.provenance, manifest.metrics
    tokens = metrics.get("rollout/response_tokens") or metrics.get("update/trained_tokens")
    return {
        "digest": manifest.digest,
        "shards": len(manifest.shards),
        "made": provenance.get("made"),
        "found": provenance.get("found"),
        "attempts": provenance.get("attempt"),
        "who": f"{provenance['host']}:{provenance['pid']}",
        "samples": num_samples(manifest),
        "tokens": None if tokens is None else int(tokens),
        "seconds": round(provenance["seconds"], 3),
        "reward": metrics.get("reward/mean"),
        "weights_digest": manifest.outcome.get("weights_digest"),
    }


def num_samples(manifest: Manifest) -> int:
    """Samples that a stage's output holds; of an update, those that it trained on."""
    trained = manifest.metrics.get("update/trained_samples")
    return manifest.rows if trained is None else int(trained)


def status_table(found: dict[str, Any]) -> None:
    """Print a status: a line an iteration, then how far the run is."""
    table = [_line(found, iteration) for iteration in _iterations(found)]
    names = [name for name in table[0] if any(row[name] for row in table)] if table else []
    rows = [[row[name] for name in names] for row in table]
    hidden = len(rows) - _SHOWN_FIRST - _SHOWN_LAST
    if hidden > 1 and sys.stdout.isatty():
        rows[_SHOWN_FIRST:-_SHOWN_LAST] = [["…", *[""] * (len(names) - 1)]]
    if rows:
        print_table(names, rows)
    finished, planned = found["finished_iterations"], found["planned_iterations"]
    kept = ", ".join(map(str, found["snapshots"]))
    print(f"\n{finished} of {planned} iterations finished: {found['run']}")
    print(f"policies kept: {kept}" if kept else "no policy is kept yet")


def _iterations(found: dict[str, Any]) -> Iterable[int]:
    return sorted({row["iteration"] for row in found["stages"]})


def _line(found: dict[str, Any], iteration: int) -> dict[str, str]:
    stages = {row["stage"]: row for row in found["stages"] if row["iteration"] == iteration}
    rollout, score = stages.get("rollout", {}), stages.get("score", {})
    reused = sum(row.get("found") or 0 for row in stages.values())
    return {
        "iteration": str(iteration),
        "reward": _decimals(score.get("reward"), 3),
        "samples": _count(rollout.get("samples")),
        "trained": _count(stages.get("update", {}).get("samples")),
        "tokens": _count(rollout.get("tokens")),
        **{stage: _seconds(stages.get(stage)) for stage in STAGES},
        "shards kept": _count(reused or None),
        "attempts": _count(attempts) if (attempts := _attempts(stages.values())) > 1 else "",
        "policy": "kept" if iteration in found["snapshots"] else "",
        "files": "retired" if any(row.get("is_retired") for row in stages.values()) else "",
    }


def _attempts(rows: Iterable[dict[str, Any]]) -> int:
    """Attempts at the stage of an iteration that took the most."""
    return max((row.get("attempts") or 1 for row in rows), default=1)


def _seconds(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["state"] == "partial":
        return f"{row['shards']} of {row['of']}" if row["of"] else "begun"
    return f"{row['seconds']:,.2f} s"


def summary(found: dict[str, Any]) -> str:
    """How a run ended, and how to look at it."""
    rewards = [row["reward"] for row in found["stages"] if row.get("reward") is not None]
    seconds = sum(row.get("seconds") or 0.0 for row in found["stages"])
    run = shlex.quote(found["run"])
    lines = [
        f"\n{_how_far(found)}, {seconds:.0f} s of work",
        f"reward: {rewards[0]:.3f} → {rewards[-1]:.3f}" if rewards else "reward: none known",
        f"the run lies at {found['run']}",
        f"  ratchet status  {run}",
        f"  ratchet samples {run} --sort 'reward desc'",
        *(f"  {line}" for line in _mlflow_lines(found["tracking"])),
    ]
    return "\n".join(lines)


def _how_far(found: dict[str, Any]) -> str:
    finished, planned = found["finished_iterations"], found["planned_iterations"]
    if found["is_complete"]:
        return f"complete: all {finished} iterations"
    return f"{finished} of {planned} iterations"


def _mlflow_lines(tracking: dict[str, Any] | None) -> list[str]:
    if tracking is None:
        return []
    uri, is_server = tracking["uri"], tracking["uri"].startswith("http")
    page = f"#/experiments/{tracking['experiment_id']}/runs/{tracking['run_id']}"
    # MLflow opens on its pages for LLM applications; this asks for those of training runs.
    page = f"{uri if is_server else _LOCAL_SERVER}/{page}?workflowType=machine_learning"
    return [page] if is_server else [f"mlflow server --workers 1 --backend-store-uri {uri}", page]


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _decimals(value: float | None, places: int) -> str:
    return "" if value is None else f"{value:,.{places}f}"
