"""``ratchet gc``: what no policy that is kept needs is removed; and the pins that say what is."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from artifacts.branches import open_store, parent_url
from artifacts.collection import Collection, PinsChangedError, collect, plan_collection
from artifacts.keep_rules import KEEP_ALL, Rule, RuleError, parse_rule
from artifacts.listing import walk, walk_inherited
from artifacts.pins import USER, Pin, read_pins, remove_pin, write_pin
from artifacts.retention import read_catalog, rebuildable
from artifacts.runs import read_record
from artifacts.store import Store
from flows.config import UserError
from flows.holding import hold_run
from flows.record import config_of
from flows.tables import print_table
from stages.contract import StageError


def print_collection(url: str, keep: Sequence[str], dry_run: bool, as_json: bool) -> None:
    """Collect, or with ``dry_run`` only look, and print what goes and why."""
    rules = parse_rules(keep)
    store = open_existing(url)
    found = _plan(store, rules, is_held=False) if dry_run else remove(store, rules)
    if as_json:
        print(json.dumps(_as_json(url, rules, found, dry_run), indent=1, ensure_ascii=False))
    else:
        _print(url, found, dry_run)


def remove(store: Store, rules: Sequence[Rule]) -> Collection:
    """Plan and remove, holding the run. Returns what was removed.

    Raises:
        HeldError: another process writes in the run.
        StageError: the run was pinned or unpinned meanwhile.
    """
    with hold_run(store, config_of(store.url, [])):
        found = _plan(store, rules, is_held=True)
        try:
            collect(store, found)
        except PinsChangedError as error:
            raise StageError(str(error)) from error
    return found


def pin(url: str, version: int) -> None:
    """Keep policy ``version`` of the run at ``url`` from every collection to come.

    Raises:
        UserError: it is not within reach.
    """
    store = open_existing(url)
    made = write_pin(store, f"{USER}-{version:06d}", reason="pinned by hand", policies=[version])
    # Only now: a collection that began before the pin was there has left its tombstones by now.
    if problem := _out_of_reach(store, version):
        remove_pin(store, made.name)
        raise UserError(problem)
    print(f"policy {version} of {url} is pinned: ratchet gc {url} --unpin {made.name}")


def unpin(url: str, name: str) -> None:
    """Remove the pin ``name``.

    Raises:
        UserError: there is none, or a branch that is still there counts on it.
    """
    store = open_existing(url)
    pins = {each.name: each for each in read_pins(store)}
    if name not in pins:
        raise UserError(f"there is no pin {name!r}; there are {', '.join(pins) or 'none'}")
    by = pins[name].by
    if by != USER and read_record(Store(child := parent_url(store.url, by))) is not None:
        raise UserError(f"run {child} goes on from what {name!r} pins: remove that run first")
    remove_pin(store, name)
    print(f"pin {name} of {url} is removed")


def open_existing(url: str) -> Store:
    """The store of the run at ``url``. Raises UserError where there is none."""
    store = open_store(url)
    if read_record(store) is None:
        raise UserError(f"there is no run at {url!r}: give the folder or URL that holds run.json")
    return store


def parse_rules(keep: Sequence[str]) -> list[Rule]:
    """The rules that ``--keep`` gives; without any, every policy is kept."""
    try:
        return [parse_rule(text) for text in keep] or [KEEP_ALL]
    except RuleError as error:
        raise UserError(f"--keep {error}") from error


def _plan(store: Store, rules: Sequence[Rule], is_held: bool) -> Collection:
    try:
        return plan_collection(store, rules, is_held)
    except RuleError as error:
        raise UserError(f"--keep {error}") from error


def _out_of_reach(store: Store, version: int) -> str | None:
    catalog = read_catalog(store, {*walk_inherited(store), *walk(store)})
    within = rebuildable(catalog)
    if version in within:
        return None
    why = "was let go by ratchet gc" if version in catalog.updates else "is not committed"
    return f"policy {version} of {store.url} {why}; there are {_numbers(within)}"


def _as_json(url: str, rules: Sequence[Rule], found: Collection, dry_run: bool) -> dict[str, Any]:
    lines = [{"path": path, "bytes": size, "why": why} for path, size, why in found.lines()]
    return {
        "run": url,
        "dry_run": dry_run,
        "keep": [rule.text for rule in rules],
        "policies": list(found.kept),
        "pins": [asdict(pin) for pin in found.pins],
        "removed": lines,
        "files": len(lines),
        "bytes": sum(line["bytes"] for line in lines),
    }


def _print(url: str, found: Collection, dry_run: bool) -> None:
    """A line a folder and reason, then the totals; --json has each file."""
    groups: dict[tuple[str, str], list[int]] = {}
    for path, size, why in found.lines():
        groups.setdefault((path.rpartition("/")[0], why), []).append(size)
    rows = [
        [folder, f"{len(sizes):,}", f"{sum(sizes):,}", why]
        for (folder, why), sizes in groups.items()
    ]
    if rows:
        print_table(["folder", "files", "bytes", "why"], rows, texts={"folder", "why"})
        print()
    sizes = [size for _, size, _ in found.lines()]
    done = "would free" if dry_run else "freed"
    print(f"{done} {sum(sizes) / 2**20:,.1f} MiB in {len(sizes):,} files of {url}")
    print(f"policies within reach: {_numbers(found.kept)}")
    for pin in found.pins:
        print(f"pinned by {pin.by}: {_pinned(pin)} ({pin.name}: {pin.reason})")


def _pinned(pin: Pin) -> str:
    parts = [("policies", pin.policies), ("iterations", pin.iterations)]
    return ", ".join(f"{name} {_numbers(numbers)}" for name, numbers in parts if numbers)


def _numbers(numbers: Sequence[int]) -> str:
    """Numbers in order, runs of three and more as first to last."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(texts) or "none"
