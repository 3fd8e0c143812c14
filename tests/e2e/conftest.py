"""Real runs from the command line: a Prefect server, a tiny model, a config, and a launcher."""

import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import tiny
from launching import RATCHET, REWARDS, Bench, wait_until


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
