"""Real runs from the command line: a Prefect server, a tiny model, a config, and a launcher."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import yaml

import tiny

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


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory) -> Iterator[str]:
    """The API of a real Prefect server."""
    home = tmp_path_factory.mktemp("prefect")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PREFECT_HOME": str(home), "PREFECT_LOCAL_STORAGE_PATH": f"{home}/storage"}
    command = [str(Path(RATCHET).with_name("prefect")), "server", "start", "--port", str(port)]
    server = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    api = f"http://127.0.0.1:{port}/api"

    def is_up() -> bool:
        try:
            return urllib.request.urlopen(f"{api}/health", timeout=2).status == 200
        except OSError:
            return False

    wait_until(is_up, 120)
    yield api
    server.kill()
    server.wait()


@pytest.fixture(scope="module")
def bench(tmp_path_factory, prefect_server) -> Iterator[Bench]:
    """A tiny model, twelve prompts, two rewards, three iterations."""
    folder = tmp_path_factory.mktemp("bench")
    tiny.save_model(folder / "model")
    tiny.save_prompts(folder / "data.jsonl")
    (folder / "rewards.py").write_text(REWARDS)
    config = {
        "run": "whole",
        "model": "model",
        "iterations": 3,
        "data": {"path": "data.jsonl", "template": "plain", "batch_size": 8},
        "rollout": {
            "samples_per_prompt": 4,
            "max_new_tokens": 24,
            "dtype": "float32",
            "prompts_per_shard": 2,
            "max_sequences": 8,
        },
        "score": {
            "rewards": [
                {"fn": "rewards.py:digits"},
                {"fn": "rewards.py:short", "weight": 0.5},
            ]
        },
        "update": {"lr": 1e-3, "dtype": "float32", "minibatches": 2, "kl_coef": 0.01},
        "checkpoint": {"every": 2},
        "resources": {"update": {"ranks": 2}, "rollout": {"threads": 1}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    made = Bench(folder, {**os.environ, "PREFECT_API_URL": prefect_server, "COLUMNS": "200"})
    yield made
    for process in made.launched:
        if process.poll() is None:
            process.kill()
            process.wait()
