"""A run's evaluations: of what parts they consist, and each part found or made.

A part is a data source answered in one way (sampled or greedy). Its rollout and scores are made by
the same stages, engines and workers as those of training, and lie apart from them.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

from artifacts.manifests import Ref
from artifacts.store import Store
from flows.evaluation_config import EvaluateConfig
from flows.listener import Listener
from flows.plan import Plan
from stages import evaluation as evaluation_stage
from stages.contract import Committed, Progress, Work, find
from stages.evaluation import apart
from stages.rollout import run as rollout_stage
from stages.rollout.config import DataConfig, RolloutConfig
from stages.rollout.engines import Engines, SamplingOtherwise
from stages.rollout.prompts import PromptSet, prepare, prompt_work
from stages.rollout.rows import data_digest
from stages.rollout.worker import PolicyName
from stages.score.config import ScoreConfig
from stages.score.rewards import reward_digests
from stages.score.run import find_scores, score_work


class Workers(Protocol):
    """What samples and rewards: a session."""

    def engines_with(self, policy: PolicyName) -> Engines:
        """Engines that hold ``policy``."""

    def score_alone(
        self, work: Work, rollout: Committed, score: ScoreConfig, progress: Progress
    ) -> Committed:
        """Reward a rollout's samples as ``work`` says."""


@dataclass(frozen=True)
class Part:
    """A data source, and one way to answer it."""

    source: str
    mode: str
    data: DataConfig
    sampling: RolloutConfig


class Evaluation:
    """The evaluations of a run, under its configuration of now."""

    def __init__(self, store: Store, plan: Plan, config: EvaluateConfig) -> None:
        self._store, self._plan, self._config = store, plan, config
        run = plan.config
        self._score = run.score.model_copy(
            update={"rewards": config.rewards or run.score.rewards, "on_null": "drop_sample"}
        )
        modes = config.modes(run.rollout)
        self._parts = [
            Part(data.all_sources[0].name, mode, data, sampling)
            for data in config.data.all_of(run.data.template)
            for mode, sampling in modes.items()
        ]
        self._digests: dict[str, str] = {}

    def find(self, version: int, policy: Ref) -> Committed | None:
        """The committed evaluation of ``policy``, which is after ``version`` updates."""
        pairs = []
        groups = 0
        for part in self._parts:
            prompts = find(self._store, self._prompt_work(part))
            if prompts is None:
                return None
            work = self._rollout_work(version, policy, part, prompts, groups)
            rollout = find(self._store, work)
            scores = rollout and find_scores(self._store, self._score_work(version, rollout))
            if rollout is None or scores is None:
                return None
            pairs.append((rollout.ref, scores.ref))
            groups += work.identity["groups"]
        return find(self._store, self._work(version, policy, pairs))

    def make(
        self, version: int, policy: Ref, name: PolicyName, workers: Workers, report: Listener
    ) -> Committed:
        """The evaluation of ``policy``, each of its shards found or made.

        Raises:
            StageError: too many samples had an error.
        """
        pairs = []
        groups = 0
        for part in self._parts:
            work = self._prompt_work(part)
            prompts = prepare(self._store, work, part.data, self._plan.config.model)
            rolling = self._rollout_work(version, policy, part, prompts, groups)
            place = f"{version}/{part.source}/{part.mode}"
            rollout = rollout_stage.run(
                self._store,
                rolling,
                PromptSet(self._store, prompts),
                name,
                partial(self._source, workers, name, part),
                report.progress("evaluate", place),
            )
            scores = workers.score_alone(
                self._score_work(version, rollout),
                rollout,
                self._score,
                report.progress("score", place),
            )
            pairs.append((rollout.ref, scores.ref))
            groups += rolling.identity["groups"]
        return evaluation_stage.run(self._store, self._work(version, policy, pairs))

    @staticmethod
    def _source(workers: Workers, name: PolicyName, part: Part) -> rollout_stage.Source:
        return SamplingOtherwise(workers.engines_with(name), part.sampling)

    def _prompt_work(self, part: Part) -> Work:
        limit = self._plan.context - part.sampling.max_new_tokens
        if part.source not in self._digests:
            self._digests[part.source] = data_digest(part.data)
        digest = self._digests[part.source]
        return prompt_work(part.data, digest, self._plan.tokenizer_digest, limit)

    def _rollout_work(
        self, version: int, policy: Ref, part: Part, prompts: Committed, first: int
    ) -> Work:
        (rows,) = prompts.manifest.outcome["rows"]
        count = min(rows, self._config.max_prompts or rows)
        groups = range(first, first + count)
        seed = self._plan.config.seed
        return apart(
            rollout_stage.rollout_work(
                version, part.data, part.sampling, seed, prompts.ref, policy, [], groups
            )
        )

    def _score_work(self, version: int, rollout: Committed) -> Work:
        return apart(score_work(version, self._score, self._functions, rollout, reference=None))

    def _work(self, version: int, policy: Ref, pairs: list[tuple[Ref, Ref]]) -> Work:
        parts = [(part.source, part.mode) for part in self._parts]
        config = self._config
        return evaluation_stage.evaluation_work(
            version, parts, pairs, policy, config.k, config.verdict
        )

    @cached_property
    def _functions(self) -> dict[str, str]:
        return reward_digests(self._score.rewards)
