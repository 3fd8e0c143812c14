"""Real runs, killed at random moments in random processes, and resumed until they are done."""

import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from artifacts.branches import open_store
from artifacts.runs import committed, iterations
from artifacts.shards import read_shard
from launching import STAGES, Bench

ROLES = ("driver", "RolloutWorker", "ScoreWorker", "TrainerRank")
_TRIES = 60


@dataclass
class Disturbed:
    """What became of a run.

    Attributes:
        kills: whom each kill hit, and how many seconds after its process's start.
        rewritten: committed files whose bytes or times changed after their commit.
        seconds: wall time of all its processes.
        orphans: shards that no manifest names, left by dead attempts.
    """

    run: str
    kills: list[tuple[str, float]] = field(default_factory=list)
    rewritten: list[str] = field(default_factory=list)
    starts: int = 0
    seconds: float = 0.0
    orphans: int = 0


class Disturber:
    """Kills a run's processes; every choice comes from ``seed``, every moment from the machine.

    A start's kill comes within ``whole_seconds``, those of an undisturbed run, if it takes so long.
    """

    def __init__(self, bench: Bench, run: str, seed: int, whole_seconds: float) -> None:
        self._bench, self._chance, self._whole = bench, random.Random(seed), whole_seconds
        self._committed: dict[Path, int] = {}
        self.found = Disturbed(run)

    def disturb(self, kills: int) -> Disturbed:
        """Start and resume the run, and kill it up to ``kills`` times, until it ends well."""
        start = time.monotonic()
        for _ in range(_TRIES):
            command = ["resume", f"runs/{self.found.run}"]
            if not (self._bench.url(self.found.run) / "run.json").exists():
                command = ["train", "run.yaml", "--run", self.found.run]
            process = self._bench.launch(*command)
            self.found.starts += 1
            self._attack(process, kills)
            if process.returncode == 0:
                self.found.seconds = time.monotonic() - start
                self.found.orphans = len(list(orphans(self._bench.url(self.found.run))))
                return self.found
        raise AssertionError(f"{self.found.run} never ended: {self.found}")

    def _attack(self, process: subprocess.Popen, kills: int) -> None:
        """Let the process run, and kill it or a worker of it, once at most."""
        delay = self._chance.uniform(0, self._whole)
        role = self._chance.choice(ROLES)
        born = time.monotonic()
        try:
            if len(self.found.kills) < kills:
                process.communicate(timeout=delay)
        except subprocess.TimeoutExpired:
            self._kill(process, role, time.monotonic() - born)
        process.communicate(timeout=300)
        self._note_committed()

    def _kill(self, process: subprocess.Popen, role: str, seconds: float) -> None:
        tree = psutil.Process(process.pid).children(recursive=True)
        workers = [p for p in tree if _name(p).startswith(f"ray::{role}")]
        victim = self._chance.choice(workers) if workers else psutil.Process(process.pid)
        name = role if workers else "driver"
        victim.send_signal(signal.SIGKILL)
        self.found.kills.append((name, seconds))
        if name == "driver":
            process.wait()
            psutil.wait_procs(tree, timeout=60)

    def _note_committed(self) -> None:
        """Remember the times of committed files; one that moved since was written twice."""
        url = self._bench.url(self.found.run)
        now = {path: path.stat().st_mtime_ns for path in committed_files(url)}
        for path, moment in self._committed.items():
            if now.get(path) != moment:
                self.found.rewritten.append(str(path.relative_to(url)))
        self._committed = now


def committed_files(url: Path) -> Iterator[Path]:
    """Every manifest of a local run, and every file that one names."""
    store = open_store(str(url))
    for iteration in iterations(store):
        for stage in STAGES:
            for folder, manifest in committed(store, iteration, stage):
                yield url / folder / "manifest.json"
                yield from (url / folder / shard.name for shard in manifest.shards)


def orphans(url: Path) -> Iterator[Path]:
    """Shards of a local run that no manifest names."""
    named = set(committed_files(url))
    yield from (path for path in url.glob("iteration-*/*/*/shard-*") if path not in named)


def sample_ids(url: Path) -> list[str]:
    """Ids of all samples of a run, in order."""
    store = open_store(str(url))
    return [
        sample
        for iteration in iterations(store)
        for folder, manifest in committed(store, iteration, "rollout")
        for shard in manifest.shards
        for sample in read_shard(store, folder, shard)["sample_id"].to_pylist()
    ]


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""
