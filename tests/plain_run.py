"""Whole runs without a model: every stage real but for what computes at its innermost door.

Rollout, score and update run as they do in training, through a session, over a store. In place
of the engine's and the trainer's processes stand two that compute a little arithmetic: what they
sample depends on weights and seed, and new weights depend on the advantages.
"""

import contextlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from artifacts import schemas
from artifacts.errors import AlreadyExistsError
from artifacts.keys import sha256
from artifacts.manifests import Manifest, Ref, Shard, read_manifest
from artifacts.runs import write_record
from artifacts.shards import write_shard
from artifacts.store import Store
from artifacts.verification import committed_folders
from flows.config import make_config
from flows.plan import Plan
from flows.revisions import Revision, Run
from flows.session import Session
from stages.contract import Committed, Product, find_or_make
from stages.rollout.config import RolloutConfig
from stages.rollout.engine import Request, Sampled
from stages.rollout.prompts import prompt_work
from stages.rollout.worker import RolloutWorker
from stages.score.rewards import reward_digests
from stages.update.digests import tensor_records, weights_digest
from stages.update.samples import read_samples, split_minibatches
from stages.update.snapshot import KINDS, Snapshot, read_snapshot, write_snapshot
from stages.update.trainer_spec import TrainerSpec, UpdateOrder, UpdateResult
from stages.workers import Actor, LocalCluster, Placement

REWARD = '''
def share(text, **row):
    """Share of even digits; fails on a text that begins with 0."""
    if text.startswith("0"):
        raise ValueError("a leading zero")
    return sum(c in "02468" for c in text) / len(text)
'''
_SHAPES = {"embed": (3, 2), "head": (4,)}


class PlainEngine:
    """Digits drawn from the seed and the weights."""

    def __init__(self, model: str, config: RolloutConfig, context: int) -> None:
        self._most = config.max_new_tokens
        self._bias = 0.0

    def forget(self) -> None:
        """It remembers nothing."""

    def load(self, weights: Mapping[str, Any]) -> None:
        self._bias = float(sum(array.sum() for _, array in weights.values()))

    def sample(
        self, requests: Sequence[Request], sampling: RolloutConfig | None = None
    ) -> Iterator[tuple[int, Sampled]]:
        for index, request in enumerate(requests):
            draw = random.Random(f"{request.seed} {self._bias!r}")
            ids = [draw.randrange(10) for _ in range(draw.randrange(1, self._most + 1))]
            logprobs = np.array([-2.5 * draw.random() for _ in ids], np.float32)
            reason = "length" if len(ids) == self._most else "stop"
            yield index, Sampled(ids, logprobs, reason, "".join(map(str, ids)))


class PlainRolloutWorker(RolloutWorker):
    """The rollout worker with a plain engine where vLLM's would be."""

    def __init__(self, *args: Any) -> None:
        with patch("stages.rollout.vllm_engine.VllmEngine", PlainEngine):
            super().__init__(*args)


class PlainTrainer:
    """A trainer rank whose step adds the mean advantage to every weight, with momentum."""

    def __init__(self, rank: int, world: int, spec: TrainerSpec) -> None:
        self._spec = spec

    def listen(self) -> tuple[str, int]:
        return "", 0

    def join(self, address: tuple[str, int]) -> None:
        pass

    def is_alive(self) -> bool:
        return True

    def total_memory(self) -> int:
        return 1 << 40

    def load(self, store: Store, snapshot: Ref | None, checkpoints: bool) -> None:
        if snapshot is None:
            self._tensors = {
                kind: {n: np.zeros(shape, np.float32) for n, shape in _SHAPES.items()}
                for kind in KINDS
            }
            self._step = 0
            return
        saved = read_snapshot(store, snapshot)
        self._tensors = {kind: dict(saved.tensors[kind]) for kind in KINDS}
        self._step = int(saved.state["step"])

    def update(self, store: Store, order: UpdateOrder) -> UpdateResult:
        spec = self._spec.under(order)
        samples = read_samples(store, order.inputs, spec.config, spec.on_null, order.wanted)
        steps, step_of_sample = [], [0] * len(samples)
        for indices in split_minibatches(samples.groups, spec.config.minibatches):
            gradient = np.float32(sum(float(samples.advantages[i].sum()) for i in indices))
            self._descend(gradient, np.float32(spec.config.lr))
            for i in indices:
                step_of_sample[i] = self._step
            tokens = sum(len(samples.loss_masks[i]) for i in indices if samples.weights_S[i] > 0)
            steps.append(self._metrics(float(gradient), tokens))
        records = tensor_records(self.weights())
        seconds = {"read": 0.0, "steps": 0.0}
        digest = weights_digest(records)
        return UpdateResult(digest, records, steps, samples, step_of_sample, seconds)

    def _descend(self, gradient: np.float32, lr: np.float32) -> None:
        self._step += 1
        for name, weight in self._tensors["weights"].items():
            first, second = self._tensors["exp_avg"][name], self._tensors["exp_avg_sq"][name]
            first += gradient
            second += gradient * gradient
            weight += lr * first

    def _metrics(self, loss: float, tokens: int) -> dict[str, float]:
        trained = {"update/trained_tokens": tokens, "update/trained_samples": 1}
        return {"step": self._step, "update/loss": loss, **trained}

    def take_stock(self) -> str:
        return weights_digest(tensor_records(self.weights()))

    def weights(self) -> dict[str, tuple[str, np.ndarray]]:
        return {name: ("float32", array) for name, array in self._tensors["weights"].items()}

    def save(self, store: Store, folder: str) -> list[Shard]:
        state = {"step": self._step, "taken": self._step}
        return write_snapshot(store, folder, Snapshot(self._tensors, state))


_STAND_INS = {
    "stages.rollout.worker:RolloutWorker": "plain_run:PlainRolloutWorker",
    "stages.update.trainer:TrainerRank": "plain_run:PlainTrainer",
}


class PlainCluster(LocalCluster):
    """Workers in this process, the two heavy ones replaced."""

    def start(self, worker: str, args: Sequence[tuple[Any, ...]], place: Placement) -> list[Actor]:
        return super().start(_STAND_INS.get(worker, worker), args, place)


def plain_plan(folder: Path, **changes: Any) -> Plan:
    """Two iterations of two prompts, two samples each, a shard a prompt; rewards in ``folder``."""
    reward = folder / "plain_rewards.py"
    if not reward.exists():
        reward.write_text(REWARD)
    values = {
        "store": str(folder),
        "model": "model",
        "iterations": 2,
        "data": {"path": "rows.jsonl", "batch_size": 2},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 6, "prompts_per_shard": 1},
        "score": {"rewards": [{"fn": f"{reward}:share"}]},
        # There is no model to estimate the memory of.
        "update": {"lr": 0.125, "minibatches": 2, "activation_checkpointing": False},
        "checkpoint": {"every": 2},
        **changes,
    }
    config = make_config(values, [], "plain")
    return Plan(
        config=config,
        context=38,
        max_prompt_tokens=32,
        model_digest="a" * 64,
        tokenizer_digest="b" * 64,
        data_digest="c" * 64,
        functions=reward_digests(config.score.rewards),
    )


def commit_prompts(store: Store, plan: Plan) -> Committed:
    """Three prompts, tokenised by hand."""
    data = plan.config.data
    work = prompt_work(
        data,
        plan.data_digest,
        plan.tokenizer_digest,
        plan.max_prompt_tokens,
        plan.config.rollout.max_new_tokens,
    )
    rows = [
        {
            "prompt_id": sha256(bytes([row])),
            "source": data.all_sources[0].name,
            "row": row,
            "token_ids": [1, row + 4],
            "text": f"{row}?",
            "ground_truth": None,
            "extra": json.dumps({"level": row}),
        }
        for row in range(3)
    ]
    table = pa.Table.from_pylist(rows, schema=schemas.PROMPTS)

    def make() -> Product:
        return Product([write_shard(store, work.folder, 0, table)], {"rows": [3], "skipped": [0]})

    return find_or_make(store, work, make)


def begin(store: Store, plan: Plan) -> Session:
    """A session on the run of ``plan`` in ``store``, its record and prompts made or found."""
    with contextlib.suppress(AlreadyExistsError):
        write_record(store, plan.record())
    session = Session(Run(store, [Revision(1, plan)]), debug=True)
    session.pools.cluster = PlainCluster()
    commit_prompts(store, plan)
    return session


def train(store: Store, plan: Plan) -> Session:
    """Start the run of ``plan`` in ``store``, or go on with it, to its end."""
    session = begin(store, plan)
    for iteration in range(1, plan.config.iterations + 1):
        session.rollout(iteration)
        session.score(iteration)
        session.update(iteration)
        session.snapshot(iteration)
    return session


def manifests(store: Store) -> dict[str, Manifest]:
    """Every manifest that is committed, by its folder."""
    return {folder: read_manifest(store, folder) for folder in committed_folders(store)}


def digests(store: Store) -> dict[str, str]:
    """Content digest of every manifest, by its folder."""
    return {folder: manifest.digest for folder, manifest in manifests(store).items()}
