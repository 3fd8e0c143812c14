"""The workers of a run: each pool made on first use and kept warm, in Ray or in this process."""

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from artifacts.keys import canonical
from flows.plan import Plan
from stages.rollout.engines import Engines
from stages.rollout.worker import PolicyName
from stages.score.config import ScoreConfig
from stages.score.judge_spec import JudgeSpec, with_rubric
from stages.score.rewards import reward_digests
from stages.score.scorers import RewardModels, Scorers
from stages.score.worker import ReferenceSpec, ScorerSpec
from stages.update.trainer_spec import TrainerSpec
from stages.update.trainers import Trainers
from stages.workers import Cluster, LocalCluster, Placement


class Pools:
    """Engines, scorers and trainers of one run."""

    def __init__(self, plan: Plan, debug: bool) -> None:
        self._plan, self._config = plan, plan.config
        self._resources = plan.config.resources
        self._debug = debug
        self._others: dict[bytes, Scorers] = {}

    def warm_up(self) -> None:
        """Start all workers side by side. Returns before they are ready."""
        if not self._debug:
            self.trainers.start()
            if not self._config.data.has_pairs:
                self.engines.start()
            self.scorers.start()

    def close(self) -> None:
        """End all workers."""
        if "cluster" in vars(self):
            self.cluster.shutdown()

    @cached_property
    def cluster(self) -> Cluster:
        """Where workers live."""
        if self._debug:
            return LocalCluster()
        from stages.ray_cluster import RayCluster

        return RayCluster(self._resources.ray_address, _object_store_bytes(self._config.model))

    @cached_property
    def engines(self) -> Engines:
        """What samples."""
        wanted = self._resources.rollout
        count = 1 if self._debug else wanted.engines
        base = PolicyName(0, self._plan.model_digest)
        return Engines(
            self.cluster,
            self._config.model,
            base,
            self._config.rollout,
            self._plan.context,
            count,
            Placement(wanted.gpus, wanted.threads or _share(count)),
        )

    @cached_property
    def scorers(self) -> Scorers:
        """What rewards."""
        return self._scorers(self._config.score, reference_spec(self._plan))

    def scorers_of(self, score: ScoreConfig) -> Scorers:
        """What gives the rewards of ``score`` and nothing else: the run's own where those do."""
        if score.rewards == self._config.score.rewards and reference_spec(self._plan) is None:
            return self.scorers
        key = canonical([spec.model_dump(mode="json") for spec in score.rewards])
        if key not in self._others:
            self._others[key] = self._scorers(score, None)
        return self._others[key]

    def _scorers(self, score: ScoreConfig, reference: ReferenceSpec | None) -> Scorers:
        wanted = self._resources.score
        count = 1 if self._debug else wanted.workers
        rewards = [with_rubric(s) if isinstance(s, JudgeSpec) else s for s in score.rewards]
        is_own = score.rewards == self._config.score.rewards
        digests = self._plan.functions if is_own else reward_digests(score.rewards)
        spec = ScorerSpec(rewards, reference, self._config.model, count, self._debug, digests)
        place = Placement(wanted.gpus, wanted.threads or _share(wanted.workers))
        return Scorers(self.cluster, spec, place, score.retries, self._reward_models)

    @cached_property
    def _reward_models(self) -> RewardModels:
        wanted = self._resources.reward_model
        count = 1 if self._debug else wanted.workers
        place = Placement(wanted.gpus, wanted.threads or _share(wanted.workers))
        return RewardModels(self.cluster, count, place)

    @cached_property
    def trainers(self) -> Trainers:
        """What learns."""
        wanted = self._resources.update
        spec = TrainerSpec(
            self._config.model,
            self._config.update,
            self._config.score.on_null,
            self._config.rollout.temperature,
            self._config.total_steps,
            self._config.rollout.dtype,
            self._plan.context,
        )
        place = Placement(wanted.gpus, wanted.threads or _share(wanted.ranks))
        return Trainers(self.cluster, spec, wanted.ranks, place)


def reference_spec(plan: Plan) -> ReferenceSpec | None:
    """The reference model's pass, where anything needs one."""
    if not plan.needs_reference:
        return None
    config = plan.config
    return ReferenceSpec(
        config.model,
        config.update.dtype,
        config.rollout.temperature,
        config.update.max_tokens_per_rank,
    )


def reference_identity(plan: Plan) -> dict[str, Any] | None:
    """What of the reference model's pass changes its log-probs."""
    spec = reference_spec(plan)
    if spec is None:
        return None
    return {"model": plan.model_digest, "dtype": spec.dtype, "temperature": spec.temperature}


def _share(count: int) -> int:
    return max(1, (os.cpu_count() or 1) // count)


def _object_store_bytes(model: str) -> int:
    # Room for the weights of two policies in float32, when the files are bfloat16.
    return 4 * sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
