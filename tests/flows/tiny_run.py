"""Whole small trainings inside the test's own process: a real engine, trainer, reward, store."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

import tiny
from artifacts.branches import open_store
from artifacts.runs import committed
from flows.config import load_config
from flows.plan import make_plan
from flows.record import open_run
from flows.session import Session
from stages.contract import Committed

REWARDS = '''
def digits(text, **row):
    """Share of digits."""
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def short(text, num_tokens, **row):
    """1 for an empty answer, falling with length."""
    return 1 / (1 + num_tokens)
'''
CONFIG = {
    "run": "whole",
    "model": "model",
    "iterations": 4,
    "data": {"path": "data.jsonl", "template": "plain", "batch_size": 4},
    "rollout": {
        "engine": "hf",
        "samples_per_prompt": 3,
        "max_new_tokens": 6,
        "dtype": "float32",
        "prompts_per_shard": 2,
    },
    "score": {"rewards": [{"fn": "rewards.py:digits"}]},
    "update": {"lr": 1e-3, "dtype": "float32", "minibatches": 2},
    "checkpoint": {"every": 2},
    "tracking": {"enabled": False},
}
STAGES = ("rollout", "score", "update")


def write_inputs(folder: Path, **changes: object) -> None:
    """A tiny model, six prompts, two rewards and ``run.yaml`` in ``folder``."""
    tiny.save_model(folder / "model")
    tiny.save_prompts(folder / "data.jsonl", count=6)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))


@contextmanager
def session(*overrides: str, allow_change: bool = False) -> Iterator[Session]:
    """A session on ``run.yaml`` of the current folder, all its workers in this process."""
    config = load_config("run.yaml", overrides)
    made = Session(open_run(make_plan(config), allow_change), debug=True)
    try:
        yield made
    finally:
        made.pools.close()


def train(session: Session, until: int | None = None) -> None:
    """What the flow does, without Prefect: every iteration's stages, and what snapshots are due."""
    for _ in stages(session, until):
        pass


def stages(session: Session, until: int | None = None) -> Iterator[Committed]:
    """The same, stage by stage: what each one committed, before the next begins."""
    for iteration in range(len(session.history) + 1, (until or session.config.iterations) + 1):
        for number in session.rounds(iteration):
            yield session.rollout(iteration, number)
            yield session.score(iteration, number)
        made = session.update(iteration)
        session.snapshot(iteration)
        yield made


def digests(url: str) -> dict[tuple[int, str], list[str]]:
    """Content digest of every manifest of the run, by iteration and stage."""
    store = open_store(url)
    found = {}
    for iteration in range(1, 20):
        for stage in STAGES:
            if made := committed(store, iteration, stage):
                found[iteration, stage] = [manifest.digest for _, manifest in made]
    return found
