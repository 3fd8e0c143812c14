"""Real runs from the command line: a Prefect server, a tiny model, a config, and a launcher."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import tiny
from launching import REWARDS, Bench, start_prefect


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens at."""
    return _free_port()


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory) -> Iterator[str]:
    """The API of a real Prefect server."""
    port = _free_port()
    server = start_prefect(port, tmp_path_factory.mktemp("prefect"))
    yield f"http://127.0.0.1:{port}/api"
    server.kill()
    server.wait()


@pytest.fixture(scope="module")
def bench(tmp_path_factory, prefect_server) -> Iterator[Bench]:
    """A tiny model, twelve prompts, two rewards, three iterations; the engine that starts fast."""
    yield from _bench(tmp_path_factory.mktemp("bench"), prefect_server, "hf")


@pytest.fixture(scope="module")
def vllm_bench(tmp_path_factory, prefect_server) -> Iterator[Bench]:
    """The same with vLLM."""
    yield from _bench(tmp_path_factory.mktemp("vllm"), prefect_server, "vllm")


def _bench(folder: Path, prefect_server: str, engine: str) -> Iterator[Bench]:
    tiny.save_model(folder / "model")
    tiny.save_prompts(folder / "data.jsonl")
    (folder / "rewards.py").write_text(REWARDS)
    config = {
        "run": "whole",
        "model": "model",
        "iterations": 3,
        "data": {"path": "data.jsonl", "template": "plain", "batch_size": 8},
        "rollout": {
            "engine": engine,
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
        "retries": {"delay_seconds": 0.1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    made = Bench(folder, {**os.environ, "PREFECT_API_URL": prefect_server, "COLUMNS": "200"})
    yield made
    for process in made.launched:
        if process.poll() is None:
            process.kill()
            process.wait()
