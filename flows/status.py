"""What is committed of a run, read from manifests alone."""

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from artifacts.attempts import read_attempts
from artifacts.branches import open_store
from artifacts.manifests import Manifest
from artifacts.rounds import in_round
from artifacts.runs import is_committed, iterations, read_record
from artifacts.store import Store
from artifacts.tombstones import is_retired
from flows.config import Config, UserError
from flows.evaluations import evaluation_rows, print_evaluations
from flows.iteration import Iteration, next_groups, read_iteration
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
        row
        for iteration in iterations(store)
        for row in _iteration_rows(store, plan_at(revisions, iteration).config, iteration)
    ]
    planned = revisions[-1].plan.config.iterations
    updates = sum(row["stage"] == "update" and row["state"] == "committed" for row in rows)
    return {
        "run": url,
        "planned_iterations": planned,
        "finished_iterations": updates,
        "is_complete": updates >= planned,
        "snapshots": snapshots(store),
        "evaluations": evaluation_rows(store),
        "tracking": tracking_record(store),
        "stages": rows,
    }


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


def _iteration_rows(store: Store, config: Config, iteration: int) -> list[dict[str, Any]]:
    """A row for each stage of each round that is committed, and for the one that is begun."""
    made = read_iteration(store, iteration)
    rows = [
        {
            **_place(iteration, name),
            "state": "committed",
            "folder": output.folder,
            "is_retired": is_retired(store, output.folder),
            **_facts(output.manifest),
        }
        for name, output in made.outputs().items()
    ]
    name = _begun_stage(config, made)
    row = _partial_row(store, iteration, name.partition(".")[0]) if name else None
    if row is None:
        return rows
    return [*rows, {**_place(iteration, name), **row, "of": _num_shards(config, made, name)}]


def _place(iteration: int, name: str) -> dict[str, Any]:
    """Where a row belongs; ``name`` is a stage in a round, such as ``score.2``."""
    stage, _, number = name.partition(".")
    return {"iteration": iteration, "stage": stage, "round": int(number or 1)}


def _begun_stage(config: Config, made: Iteration) -> str:
    """The stage, and its round, that follows what is committed; empty where nothing does."""
    count = len(made.rounds)
    if made.update is not None:
        return ""
    if made.rounds and made.rounds[-1].scores is None:
        return in_round("score", count)
    return in_round("rollout", count + 1) if next_groups(config, made.rounds) else "update"


def _partial_row(store: Store, iteration: int, stage: str) -> dict[str, Any] | None:
    """What lies of a stage that is begun and not committed; None where nothing does."""
    parent = f"iteration-{iteration:06d}/{stage}"
    folders = [f"{parent}/{name}" for name in store.names(parent)]
    begun = [folder for folder in folders if not is_committed(store, folder)]
    if not begun:
        return None
    # Of several keys' folders, the one that was begun last.
    tries = {folder: read_attempts(store, folder) for folder in begun}
    folder = max(begun, key=lambda f: max((a["start"] for a in tries[f]), default=0.0))
    shards = [name for name in store.names(folder) if name.endswith(".arrow")]
    last = tries[folder][-1] if tries[folder] else {}
    return {
        "state": "partial",
        "folder": folder,
        "shards": sum(not name.startswith("ledger.") for name in shards),
        "attempts": len(tries[folder]),
        "who": f"{last['host']}:{last['pid']}" if last else None,
        "start": last.get("start"),
    }


def _num_shards(config: Config, made: Iteration, name: str) -> int | None:
    """Shards that the begun stage's output will have; None where that isn't known beforehand."""
    if name.startswith("rollout"):
        return -(-len(next_groups(config, made.rounds)) // config.rollout.prompts_per_shard)
    return len(made.rounds[-1].rollout.manifest.shards) if name.startswith("score") else None


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
        "rewarded": _num_rewarded(manifest),
        "weights_digest": manifest.outcome.get("weights_digest"),
    }


def _num_rewarded(manifest: Manifest) -> int | None:
    """Samples that have a reward; None where the stage gives none."""
    if manifest.kind != "scores":
        return None
    return round(manifest.rows * (1 - (manifest.metrics.get("score/null_share") or 0.0)))


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
    if found["evaluations"]:
        print()
        print_evaluations(found["evaluations"])


def _iterations(found: dict[str, Any]) -> Iterable[int]:
    return sorted({row["iteration"] for row in found["stages"]})


def _line(found: dict[str, Any], iteration: int) -> dict[str, str]:
    rows = [row for row in found["stages"] if row["iteration"] == iteration]
    stages = {stage: [row for row in rows if row["stage"] == stage] for stage in STAGES}
    rounds = max(row["round"] for row in rows)
    attempts = _attempts(rows)
    return {
        "iteration": str(iteration),
        "rounds": str(rounds) if rounds > 1 else "",
        "reward": _decimals(_reward(rows), 3),
        "samples": _count(_total(stages["rollout"], "samples")),
        "trained": _count(_total(stages["update"], "samples")),
        "tokens": _count(_total(stages["rollout"], "tokens")),
        **{stage: _seconds(stages[stage]) for stage in STAGES},
        "shards kept": _count(_total(rows, "found") or None),
        "attempts": _count(attempts) if attempts > 1 else "",
        "policy": "kept" if iteration in found["snapshots"] else "",
        "files": "retired" if any(row.get("is_retired") for row in rows) else "",
    }


def _total(rows: Iterable[dict[str, Any]], name: str) -> int | None:
    """Sum over rounds; None where no row says."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) if values else None


def _reward(rows: Sequence[dict[str, Any]]) -> float | None:
    """Mean reward of an iteration's samples, over its rounds; None where none is known."""
    scored = [(row["reward"], row["rewarded"]) for row in rows if row.get("reward") is not None]
    count = sum(rewarded for _, rewarded in scored)
    return sum(reward * rewarded for reward, rewarded in scored) / count if count else None


def _attempts(rows: Iterable[dict[str, Any]]) -> int:
    """Attempts at the stage of an iteration that took the most."""
    return max((row.get("attempts") or 1 for row in rows), default=1)


def _seconds(rounds: Sequence[dict[str, Any]]) -> str:
    """Of a stage's rows: the seconds of all rounds, or how far the one at work has come."""
    if not rounds:
        return ""
    last = rounds[-1]
    if last["state"] == "partial":
        return f"{last['shards']} of {last['of']}" if last["of"] else "begun"
    return f"{sum(row['seconds'] for row in rounds):,.2f} s"


def summary(found: dict[str, Any]) -> str:
    """How a run ended, and how to look at it."""
    means = [
        _reward([row for row in found["stages"] if row["iteration"] == iteration])
        for iteration in _iterations(found)
    ]
    rewards = [mean for mean in means if mean is not None]
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
