"""What is committed of a run, read from manifests alone."""

from typing import Any

from artifacts.manifests import Manifest
from artifacts.runs import committed, iterations, read_record
from artifacts.store import Store
from flows.config import UserError
from flows.tables import print_table

STAGES = ("rollout", "score", "update")


def run_status(url: str) -> dict[str, Any]:
    """The run's state, as JSON values."""
    store = Store(url)
    record = read_record(store)
    if record is None:
        raise UserError(f"there is no run at {url!r}: give the folder or URL that holds run.json")
    rows = [_stage_row(store, i, stage) for i in iterations(store) for stage in STAGES]
    planned = int(record["config"]["iterations"])
    updates = sum(row["stage"] == "update" and row["state"] == "committed" for row in rows)
    return {
        "run": url,
        "planned_iterations": planned,
        "finished_iterations": updates,
        "is_complete": updates >= planned,
        "stages": [row for row in rows if row["state"] != "absent"],
    }


def _stage_row(store: Store, iteration: int, stage: str) -> dict[str, Any]:
    row: dict[str, Any] = {"iteration": iteration, "stage": stage, "state": "absent"}
    found = committed(store, iteration, stage)
    if found:
        folder, manifest = found[-1]
        return row | {"state": "committed", "folder": folder, **_facts(stage, manifest)}
    parent = f"iteration-{iteration:06d}/{stage}"
    shards = [name for f in store.names(parent) for name in store.names(f"{parent}/{f}")]
    if shards:
        return row | {"state": "partial", "shards": len(shards)}
    return row


def _facts(stage: str, manifest: Manifest) -> dict[str, Any]:
    provenance, metrics = manifest.provenance, manifest.metrics
    tokens = metrics.get("rollout/response_tokens") or metrics.get("update/trained_tokens")
    return {
        "digest": manifest.digest,
        "shards": len(manifest.shards),
        "made": provenance.get("made"),
        "found": provenance.get("found"),
        "rows": manifest.rows,
        "tokens": None if tokens is None else int(tokens),
        "seconds": round(provenance["seconds"], 3),
        "reward": metrics.get("reward/mean"),
        "weights_digest": manifest.outcome.get("weights_digest"),
    }


def status_table(found: dict[str, Any]) -> None:
    """Print a status as a table."""
    columns = [
        "iteration",
        "stage",
        "state",
        "shards",
        "made",
        "found",
        "rows",
        "tokens",
        "seconds",
        "reward",
    ]
    print_table(columns, [[_text(row.get(name)) for name in columns] for row in found["stages"]])
    finished, planned = found["finished_iterations"], found["planned_iterations"]
    print(f"\n{finished} of {planned} iterations finished: {found['run']}")


def summary(found: dict[str, Any]) -> str:
    """How a run ended, and how to look at it."""
    rewards = [row["reward"] for row in found["stages"] if row.get("reward") is not None]
    seconds = sum(row.get("seconds") or 0.0 for row in found["stages"])
    lines = [
        f"\n{found['finished_iterations']} iterations, {seconds:.0f} s of work",
        f"reward: {rewards[0]:.3f} → {rewards[-1]:.3f}" if rewards else "reward: none known",
        f"the run lies at {found['run']}",
        f"  ratchet status  {found['run']}",
        f"  ratchet samples {found['run']} --sort 'reward desc'",
    ]
    return "\n".join(lines)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
