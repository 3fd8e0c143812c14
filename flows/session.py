"""A run in the hands of this process: its store, its workers, and how far it has come.

The three stage methods read as an iteration does: rollout and score, round by round, then update.
Each finds what is committed or makes it, so calling them again costs nothing and changes nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from artifacts.rounds import in_round
from flows.iteration import Round
from flows.listener import Listener
from flows.pools import Pools
from flows.revisions import Run
from flows.standing import Standing
from stages.contract import Committed, Progress, StageError, Work
from stages.rollout import run as rollout_stage
from stages.rollout.engines import Engines
from stages.rollout.given import GivenResponses
from stages.rollout.worker import PolicyName
from stages.score import run as score_stage
from stages.score.config import ScoreConfig
from stages.score.scorers import Values
from stages.update import run as update_stage
from stages.update.critic_name import CriticName
from stages.update.trainers import is_rebuildable


class Session(Standing):
    """See the module's docstring."""

    def __init__(self, run: Run, report: Listener | None = None, debug: bool = False) -> None:
        super().__init__(run, report)
        self.pools = Pools(run.plan, debug)

    def rollout(self, iteration: int, number: int = 1) -> Committed:
        """Sample a round's groups with the policy that the updates so far have made; or take them
        from the data, where it holds the responses."""
        work = self.rollout_work(iteration, number)
        if seen := self._recalled(iteration, "rollout", number, work):
            return seen
        policy = self.policy_name()
        made = rollout_stage.run(
            self.store,
            work,
            self.prompts(iteration),
            policy,
            lambda: self._source(policy),
            self.report.progress("rollout", in_round(iteration, number)),
        )
        self._at(iteration).rounds[number - 1 :] = [Round(made)]
        return made

    def score(self, iteration: int, number: int = 1) -> Committed:
        """Reward a round's samples."""
        seen = self._recalled(iteration, "score", number, self.score_work(iteration, number))
        critic = self.critic_name(iteration)
        values = None if critic is None else partial(self._values_of, critic)
        return seen or self._score(score_stage.run, iteration, number, critic=values)

    def retry_errors(self, iteration: int) -> Committed:
        """Reward those of the iteration's scored samples again whose reward failed, round by round.

        What follows a round is as its new scores say: another one may be due, or less of one.
        """
        if self.recall(iteration).update is not None:
            raise StageError(
                f"iteration {iteration} has been trained on as it was scored, and that stays: "
                "branch from the iteration before it to train on other rewards"
            )
        made = []
        for number in self.rounds(iteration):
            is_whole = self._recall_round(iteration, number, self.store)
            if number > 1 and not is_whole:
                break
            made.append(self._score(score_stage.retry_errors, iteration, number))
        return made[-1]

    def _score(
        self, how: Callable[..., Committed], iteration: int, number: int, **options: Any
    ) -> Committed:
        work, rollout = self.score_work(iteration, number), self._round(iteration, number).rollout
        made = how(
            self.store,
            work,
            rollout,
            self.config.score,
            lambda: self.pools.scorers,
            self.report.progress("score", in_round(iteration, number)),
            **options,
        )
        self._at(iteration).rounds[number - 1 :] = [Round(rollout, made)]
        return made

    def score_alone(
        self, work: Work, rollout: Committed, score: ScoreConfig, progress: Progress
    ) -> Committed:
        """Reward a rollout's samples as ``work`` says, with no reference and no critic."""
        scorers = partial(self.pools.scorers_of, score)
        return score_stage.run(self.store, work, rollout, score, scorers, progress)

    def update(self, iteration: int) -> Committed:
        """Make the next policy. Its snapshot follows in :meth:`snapshot`."""
        work = self.update_work(iteration)
        made = self._recalled(iteration, "update", 1, work) or update_stage.run(
            self.store,
            work,
            self.history,
            sum(made.rollout.manifest.rows for made in self._at(iteration).rounds),
            lambda: self.pools.trainers,
            self.report.progress("update", str(iteration)),
        )
        self._at(iteration).update = made
        self.history.append(made)
        return made

    def snapshot(self, iteration: int) -> Committed | None:
        """Keep weights and trainer state, where one is due after ``iteration``.

        A policy of the past that ``ratchet gc`` has let go of is due no more.
        """
        if not self._is_kept(iteration):
            return None
        update = self.history[-1]
        if found := self.find_snapshot(update):
            return found
        if update.was_reused and not is_rebuildable(self.store, self.history):
            return None
        return self.snapshot_now()

    def snapshot_now(self) -> Committed:
        """The committed snapshot of the newest policy; made where there is none."""
        update = self.history[-1]
        if found := self.find_snapshot(update):
            return found
        trainers = self.pools.trainers
        trainers.bring_to(self.store, self.history)
        return update_stage.save_snapshot(self.store, update, trainers)

    def evaluate(self, version: int) -> Committed | None:
        """Answer held-out prompts with policy ``version``, which is that after the history.

        None for a policy of the past that ``ratchet gc`` has let go of.
        """
        assert version == len(self.history)
        made = self.find_evaluation(version)
        if made is None:
            if not is_rebuildable(self.store, self.history):
                return None
            policy = self.history[-1].ref if version else self.base
            name = self.policy_name()
            made = self.evaluation(version).make(version, policy, name, self, self.report)
        self._at(version).evaluation = made
        return made

    def _values_of(self, critic: CriticName) -> Values:
        trainers = self.pools.trainers
        trainers.bring_to(self.store, self.history)
        return partial(trainers.values, critic)

    def _source(self, policy: PolicyName) -> rollout_stage.Source:
        return GivenResponses() if self.config.data.has_pairs else self.engines_with(policy)

    def engines_with(self, policy: PolicyName) -> Engines:
        """The engines, with the weights of ``policy``: that after the history."""
        engines = self.pools.engines
        engines.start()
        if not engines.holds(policy):
            trainers = self.pools.trainers
            trainers.bring_to(self.store, self.history)
            seconds = engines.load(policy, trainers.weights())
            self.report.say("weights", policy=policy.version, seconds=seconds)
        return engines
