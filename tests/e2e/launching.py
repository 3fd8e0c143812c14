"""The command line launched for real: what to launch in, what to wait for, how to kill."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

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

    def launch(self, *args: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [RATCHET, *args],
            cwd=self.folder,
            env=self.env,
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
