"""Committed evaluations as a reader sees them: their numbers, and their samples."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from artifacts.manifests import Manifest, Ref, read_manifest
from artifacts.rounds import inputs_to_rounds
from artifacts.runs import evaluated, evaluations_of
from artifacts.store import Store
from flows.config import UserError
from flows.iteration import Round
from flows.samples import join_round
from flows.tables import print_table
from stages.contract import Committed

# What a person asks for first, of each source.
_SHOWN = ("pass_at_", "reward_mean", "response_length_mean", "truncated_share", "null_samples")


def evaluation_rows(store: Store) -> list[dict[str, Any]]:
    """Every committed evaluation, as JSON values, by policy and then in the order of time."""
    return [
        evaluation_row(version, folder, manifest)
        for version in evaluated(store)
        for folder, manifest in sorted(evaluations_of(store, version), key=_end)
    ]


def evaluation_row(version: int, folder: str, manifest: Manifest) -> dict[str, Any]:
    """An evaluation of policy ``version``, as JSON values."""
    return {
        "policy": version,
        "folder": folder,
        "digest": manifest.digest,
        "end": manifest.provenance.get("end"),
        "metrics": dict(manifest.metrics),
    }


def print_evaluations(found: Sequence[dict[str, Any]]) -> None:
    """A line for each policy, source and way of answering."""
    lines = [
        {"policy": str(row["policy"]), **{name: _text(v) for name, v in line.items()}}
        for row in found
        for line in lines_of(row["metrics"])
    ]
    if not lines:
        return
    names = list(dict.fromkeys(name for line in lines for name in line))
    print_table(names, [[line.get(name, "") for name in names] for line in lines])


def lines_of(metrics: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """What is shown of an evaluation's metrics: a line for each source and way of answering."""
    lines: dict[tuple[str, bool], dict[str, Any]] = {}
    for name in sorted(metrics, key=_place):
        source, _, rest = name.removeprefix("evaluate/").rpartition("/")
        is_greedy, rest = rest.startswith("greedy_"), rest.removeprefix("greedy_")
        if _is_shown(rest):
            first = {"source": source, "answers": "greedy" if is_greedy else "sampled"}
            line = lines.setdefault((source, is_greedy), first)
            line[rest.replace("pass_at_", "pass@")] = metrics[name]
    return [lines[key] for key in sorted(lines)]


def _is_shown(name: str) -> bool:
    return name.startswith(_SHOWN) and not name.endswith("_left_out_prompts")


def _place(name: str) -> tuple[int, int]:
    """Where a metric stands among those that are shown; pass@k by k."""
    rest = name.rpartition("/")[2].removeprefix("greedy_")
    kind = next((n for n, start in enumerate(_SHOWN) if rest.startswith(start)), len(_SHOWN))
    k = rest.removeprefix(_SHOWN[0]).partition("_")[0]
    return kind, int(k) if kind == 0 else 0


def evaluation_samples(store: Store, version: int) -> pa.Table:
    """The samples of policy ``version``'s newest evaluation with their scores.

    Raises:
        UserError: there is none.
    """
    found = evaluations_of(store, version)
    if not found:
        there = ", ".join(map(str, evaluated(store))) or "none"
        raise UserError(f"policy {version} has no committed evaluation; there are {there}")
    _, manifest = max(found, key=_end)
    parts = zip(manifest.identity["parts"], inputs_to_rounds(manifest.inputs), strict=True)
    tables = []
    for number, ((_, mode), refs) in enumerate(parts, start=1):
        rollout, scores = (_at(store, ref) for ref in refs)
        table = join_round(store, Round(rollout, scores), number)
        table = table.append_column("answers", pa.array([mode] * table.num_rows))
        tables.append(table)
    return pa.concat_tables(tables, promote_options="default")


def as_json(url: str, row: dict[str, Any]) -> str:
    """One evaluation, for a program."""
    return json.dumps({"run": url, **row}, indent=1)


def _at(store: Store, ref: Ref) -> Committed:
    return Committed(ref.path, read_manifest(store, ref.path, ref.digest), was_reused=True)


def _end(pair: tuple[str, Manifest]) -> float:
    return float(pair[1].provenance.get("end", 0.0))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
