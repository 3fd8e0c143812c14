"""The command line launched for real: what to launch in, what to wait for, how to kill."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from artifacts.branches import open_store
from artifacts.runs import committed, iterations

STAGES = ("rollout", "score", "update")
RATCHET = str(Path(sys.executable).parent / "ratchet")

REWARDS = '''
import time
from pathlib import Path

PAUSE = Path(__file__).with_name("pause")


def digits(text, ground_truth, **row):
    """Share of digits; hangs on one sample of iteration 2 while the file ``pause`` is there."""
    while PAUSE.exists() and row["sample_id"].startswith("000002-00005"):
        time.sleep(0.05)
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def short(text, num_tokens, **row):
    """1 for an empty answer, falling with length."""
    return 1 / (1 + num_tokens)
'''


# Not of the run's identity: with it and without, every byte of the training is the same.
EVALUATE = (
    "evaluate={every: 2, data: {path: data.jsonl}, max_prompts: 2, greedy: true, max_new_tokens: 8}"
)


@dataclass
class Bench:
    """A folder with all that a run needs."""

    folder: Path
    env: dict[str, str]
    launched: list[subprocess.Popen] = field(default_factory=list)

    @property
    def config(self) -> Path:
        return self.folder / "run.yaml"

    def url(self, run: str) -> Path:
        return self.folder / "runs" / run

    def cli(self, *args: str, check: int | None = 0, **env: str) -> subprocess.CompletedProcess:
        done = subprocess.run(
            [RATCHET, *args],
            cwd=self.folder,
            env={**self.env, **env},
            text=True,
            capture_output=True,
            timeout=300,
        )
        if check is not None:
            assert done.returncode == check, f"{args}: {done.returncode}\n{done.stderr[-4000:]}"
        return done

    def launch(self, *args: str, **env: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [RATCHET, *args],
            cwd=self.folder,
            env={**self.env, **env},
            text=True,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        self.launched.append(process)
        return process


def wait_for_line(process: subprocess.Popen, pattern: str) -> str:
    """Read the process's log up to a line that matches."""
    seen = []
    for line in process.stderr:
        seen.append(line)
        if re.search(pattern, line):
            return line
    raise AssertionError(f"ended without {pattern!r}:\n{''.join(seen)[-4000:]}")


def wait_until(condition, seconds: float = 60) -> None:
    """Poll for something that another process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.002)


def kill_tree(process: subprocess.Popen, number: int = signal.SIGKILL) -> list[psutil.Process]:
    """Kill the driver alone, as an out-of-memory killer would; returns what it had started."""
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, number)
    return children


def start_prefect(port: int, home: Path) -> subprocess.Popen:
    """A Prefect server that answers at ``port``."""
    env = {**os.environ, "PREFECT_HOME": str(home), "PREFECT_LOCAL_STORAGE_PATH": f"{home}/storage"}
    command = [str(Path(RATCHET).with_name("prefect")), "server", "start", "--port", str(port)]
    server = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def is_up() -> bool:
        try:
            url = f"http://127.0.0.1:{port}/api/health"
            return urllib.request.urlopen(url, timeout=2).status == 200
        except OSError:
            return False

    wait_until(is_up, 120)
    return server


def digests(url: Path) -> dict[tuple[int, str], list[str]]:
    """Content digest of every manifest, which holds every shard's digest."""
    store = open_store(str(url))
    return {
        (i, s): [m.digest for _, m in committed(store, i, s)]
        for i in iterations(store)
        for s in STAGES
    }


def file_times(url: Path) -> dict[Path, int]:
    """Time of the last change of each file of a local run."""
    return {path: path.stat().st_mtime_ns for path in url.rglob("*") if path.is_file()}


def names(url: Path, pattern: str) -> list[str]:
    """Names of the files of a local run that match."""
    return sorted(path.name for path in url.glob(pattern))


@dataclass
class Killed:
    """A run that was killed inside stages of its second iteration, and what then lay in its store.

    Attributes:
        times: of each file, when it last changed.
        kept: how many shards of each of those stages were there, without a manifest.
    """

    run: str
    times: dict[Path, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)


def kill_inside(bench: Bench, *stages: str) -> Killed:
    """Kill a run inside a stage of its second iteration, resume it, kill it in the next, and so on.

    A loaded machine may deliver a kill after the commit, which proves nothing: then once more.
    """
    for attempt in range(3):
        killed = Killed(f"killed-{'-'.join(stages)}-{attempt}")
        command = ["train", "run.yaml", "--run", killed.run]
        for stage in stages:
            if not _kill_in_stage(bench, killed, stage, command):
                break
            command = ["resume", f"runs/{killed.run}"]
        else:
            return killed
    raise AssertionError(f"three kills came too late to be inside {stages}")


def _kill_in_stage(bench: Bench, killed: Killed, stage: str, command: list[str]) -> bool:
    """Whether the kill came before the stage's commit."""
    url, pause = bench.url(killed.run), bench.folder / "pause"
    shards = f"iteration-000002/{stage}/*/shard-*"
    if stage == "score":
        pause.touch()
    process = bench.launch(*command)
    wait_for_line(process, f"start .*stage={stage} .*iteration=2")
    if stage != "update":
        wait_until(lambda: names(url, shards))
    workers = kill_tree(process)
    process.wait()
    psutil.wait_procs(workers, timeout=30)
    pause.unlink(missing_ok=True)
    killed.times |= {p: t for p, t in file_times(url).items() if p.parent.name != "lease"}
    killed.kept[stage] = len(names(url, shards))
    return not names(url, f"iteration-000002/{stage}/*/manifest.json")


def resume_and_compare(bench: Bench, killed: Killed, whole: Path) -> subprocess.CompletedProcess:
    """Resume a killed run: its bytes are ``whole``'s, and what lay in its store is as it was."""
    url = bench.url(killed.run)
    done = bench.cli("resume", f"runs/{killed.run}")
    after = file_times(url)
    assert {path: after[path] for path in killed.times} == killed.times
    assert digests(url) == digests(whole)
    return done
