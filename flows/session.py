"""A run in the hands of this process: its store, its workers, and how far it has come.

The three stage methods read as an iteration does. Each finds what is committed or makes it, so
calling them again costs nothing and changes nothing. What :meth:`Session.recall` found is not
looked for again: what is committed stays as it is.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from artifacts.ahead import ReadAhead
from artifacts.errors import IntegrityError
from artifacts.manifests import Manifest, Ref
from artifacts.runs import has_commit
from artifacts.store import Store
from flows.plan import Plan
from flows.pools import Pools, reference_spec
from flows.revisions import Run, plan_at
from stages.contract import Committed, Progress, StageError, Work, find
from stages.rollout import run as rollout_stage
from stages.rollout.engines import Engines
from stages.rollout.prompts import PromptSet, prepare, prompt_work
from stages.rollout.worker import PolicyName
from stages.score import run as score_stage
from stages.update import run as update_stage
from stages.update.trainers import is_rebuildable, policy_work

# Iterations read ahead at once: enough to keep every reader busy, and little to have read in vain.
_READ_AHEAD = 64


class Report(Protocol):
    """Where a session says what happens."""

    def progress(self, stage: str, iteration: int) -> Progress:
        """What a stage calls with its progress."""

    def say(self, event: str, **fields: Any) -> None:
        """One line."""

    def stage(self, stage: str, iteration: int, manifest: Manifest, was_reused: bool) -> None:
        """The line of a stage that has committed."""


class Silent:
    """A report that nobody reads."""

    def progress(self, stage: str, iteration: int) -> Progress:
        return lambda **_: None

    def say(self, event: str, **fields: Any) -> None:
        pass

    def stage(self, stage: str, iteration: int, manifest: Manifest, was_reused: bool) -> None:
        pass


@dataclass
class Iteration:
    """What an iteration has committed so far."""

    rollout: Committed | None = None
    scores: Committed | None = None
    update: Committed | None = None


class Session:
    """See the module's docstring."""

    def __init__(self, run: Run, report: Report | None = None, debug: bool = False) -> None:
        self.run, self.plan, self.config, self.store = run, run.plan, run.plan.config, run.store
        self.report: Report = report or Silent()
        self.history: list[Committed] = []
        self.iterations: dict[int, Iteration] = {}
        self.pools = Pools(run.plan, debug)
        self._prompts: dict[str, PromptSet] = {}

    @property
    def base(self) -> Ref:
        """Policy 0: the model that the run starts from."""
        return Ref("model", self.plan.model_digest)

    def plan_at(self, iteration: int) -> Plan:
        """The plan that ``iteration`` is made with."""
        return plan_at(self.run.revisions, iteration)

    def prompts(self, iteration: int) -> PromptSet:
        """The prompts that ``iteration`` takes from, tokenised on first use."""
        work, config = self._prompt_work(iteration), self.plan_at(iteration).config
        if work.key not in self._prompts:
            committed = prepare(self.store, work, config.data, config.model)
            self._prompts[work.key] = PromptSet(self.store, committed)
        return self._prompts[work.key]

    def rollout(self, iteration: int) -> Committed:
        """Sample the iteration's groups with the policy that the updates so far have made."""
        work = self.rollout_work(iteration)
        policy = self.policy_name()
        made = _same(self._at(iteration).rollout, work) or rollout_stage.run(
            self.store,
            work,
            self.prompts(iteration),
            policy,
            lambda: self._engines_with(policy),
            self.report.progress("rollout", iteration),
        )
        self._at(iteration).rollout = made
        return made

    def score(self, iteration: int) -> Committed:
        """Reward the iteration's samples."""
        work = self.score_work(iteration)
        seen = _same(self._at(iteration).scores, work)
        return seen or self._score(score_stage.run, iteration, work)

    def retry_errors(self, iteration: int) -> Committed:
        """Reward those of the iteration's scored samples again whose reward failed."""
        if self.recall(iteration).update is not None:
            raise StageError(
                f"iteration {iteration} has been trained on as it was scored, and that stays: "
                "branch from the iteration before it to train on other rewards"
            )
        return self._score(score_stage.retry_errors, iteration, self.score_work(iteration))

    def _score(self, how: Callable[..., Committed], iteration: int, work: Work) -> Committed:
        made = how(
            self.store,
            work,
            self._need(iteration, "rollout"),
            self.config.score,
            lambda: self.pools.scorers,
            self.report.progress("score", iteration),
        )
        self._at(iteration).scores = made
        return made

    def update(self, iteration: int) -> Committed:
        """Make the next policy. Its snapshot follows in :meth:`snapshot`."""
        work = self.update_work(iteration)
        made = _same(self._at(iteration).update, work) or update_stage.run(
            self.store,
            work,
            self.history,
            self._need(iteration, "rollout").manifest.rows,
            lambda: self.pools.trainers,
            self.report.progress("update", iteration),
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

    def find_snapshot(self, update: Committed) -> Committed | None:
        """The committed snapshot of the policy that ``update`` made.

        One that has lost a file counts as none: it is made again, where it can be.
        """
        try:
            return find(self.store, policy_work(update))
        except IntegrityError as error:
            self.report.say("snapshot", state="not whole", error=error)
            return None

    def is_complete(self) -> bool:
        """Whether nothing is left to make, snapshots included. Reads, and makes nothing."""
        iterations = self.config.iterations
        if not has_commit(self.store, iterations, "update"):  # one look, where there is much to do
            return False
        is_done = self.recall_finished() == iterations and all(
            self.find_snapshot(update) or not is_rebuildable(self.store, self.history[:iteration])
            for iteration, update in enumerate(self.history, start=1)
            if self._is_kept(iteration)
        )
        self.history.clear()
        return is_done

    def look_back(self) -> None:
        """Recall what is committed in one go, so that the stages of it need not look one by one."""
        self.recall_finished()
        self.history.clear()

    def recall(self, iteration: int, ahead: Store | None = None) -> Iteration:
        """What ``iteration`` has committed; remembered as if this session had made it.

        Args:
            ahead: the store, read ahead.
        """
        seen, store = self._at(iteration), ahead or self.store
        prompts = self._prompt_work(iteration)
        if prompts.key not in self._prompts and find(store, prompts) is None:
            return seen
        seen.rollout = find(store, self.rollout_work(iteration))
        if seen.rollout:
            seen.scores = score_stage.find_scores(store, self.score_work(iteration))
        if seen.scores:
            seen.update = find(store, self.update_work(iteration))
        if seen.update and len(self.history) == iteration - 1:
            self.history.append(seen.update)
        return seen

    def recall_finished(self) -> int:
        """Remember every finished iteration, up to the first that is not; returns their count."""
        for seen in self._recall_to(self.config.iterations):
            if seen.update is None:
                break
        return len(self.history)

    def recall_all(self, before: int) -> None:
        """Remember the iterations before ``before``. Raises StageError where one is not whole."""
        for iteration, seen in enumerate(self._recall_to(before - 1), start=len(self.history) + 1):
            if seen.update is None:
                raise StageError(f"iteration {iteration} is not committed: resume the run first")

    def _recall_to(self, last: int) -> Iterator[Iteration]:
        """Recall the iterations after the history, up to ``last``, in batches that double."""
        first, count = len(self.history) + 1, 1
        while first <= last:
            batch = range(first, min(first + count, last + 1))
            ahead = ReadAhead(self.store, batch)
            for iteration in batch:
                yield self.recall(iteration, ahead)
            first, count = first + count, min(2 * count, _READ_AHEAD)

    def policy_name(self) -> PolicyName:
        """The policy that rollouts of the next iteration sample with."""
        if not self.history:
            return PolicyName(0, self.plan.model_digest)
        return PolicyName(len(self.history), self.history[-1].manifest.outcome["weights_digest"])

    def rollout_work(self, iteration: int) -> Work:
        """The description of an iteration's rollout; the iteration before is to be known."""
        config = self.plan_at(iteration).config
        policy = self.history[iteration - 2].ref if iteration > 1 else self.base
        return rollout_stage.rollout_work(
            iteration,
            config.data,
            config.rollout,
            config.seed,
            self.prompts(iteration).ref,
            policy,
            self._start(iteration),
        )

    def score_work(self, iteration: int) -> Work:
        """The description of an iteration's scoring."""
        plan = self.plan_at(iteration)
        spec = reference_spec(plan)
        reference = None
        if spec is not None:
            reference = {
                "model": plan.model_digest,
                "dtype": spec.dtype,
                "temperature": spec.temperature,
            }
        return score_stage.score_work(
            iteration,
            plan.config.score,
            plan.functions,
            self._need(iteration, "rollout"),
            reference,
        )

    def update_work(self, iteration: int) -> Work:
        """The description of an iteration's update."""
        config = self.plan_at(iteration).config
        return update_stage.update_work(
            iteration,
            config.update,
            config.score.on_null,
            config.rollout.temperature,
            config.total_steps,
            self._need(iteration, "rollout"),
            self._need(iteration, "scores"),
            self.history[iteration - 2].ref if iteration > 1 else self.base,
            self.plan_at(iteration).update_functions,
            self.history[iteration - 2] if iteration > 1 else None,
        )

    def _is_kept(self, iteration: int) -> bool:
        is_last = iteration == self.config.iterations
        return is_last or iteration % self.config.checkpoint.every == 0

    def _prompt_work(self, iteration: int) -> Work:
        plan = self.plan_at(iteration)
        return prompt_work(
            plan.config.data, plan.data_digest, plan.tokenizer_digest, plan.max_prompt_tokens
        )

    def _start(self, iteration: int) -> list[int]:
        """Prompts drawn of each source where the iteration before ended; [] for none."""
        before = self.iterations.get(iteration - 1)
        if before is None or before.rollout is None:
            return []
        if self.plan_at(iteration).data_digest != self.plan_at(iteration - 1).data_digest:
            return []  # another data set is gone through from its beginning
        return list(before.rollout.manifest.outcome["next_positions"])

    def _at(self, iteration: int) -> Iteration:
        return self.iterations.setdefault(iteration, Iteration())

    def _need(self, iteration: int, stage: str) -> Committed:
        made: Committed | None = getattr(self._at(iteration), stage)
        if made is None:
            raise StageError(
                f"iteration {iteration} has no committed {stage}: run that stage first"
            )
        return made

    def _engines_with(self, policy: PolicyName) -> Engines:
        engines = self.pools.engines
        engines.start()
        if not engines.holds(policy):
            trainers = self.pools.trainers
            trainers.bring_to(self.store, self.history)
            seconds = engines.load(policy, trainers.weights())
            self.report.say("weights", policy=policy.version, seconds=seconds)
        return engines


def _same(seen: Committed | None, work: Work) -> Committed | None:
    """What was recalled, where it is what ``work`` gives; what this session made is looked for."""
    is_same = seen is not None and seen.was_reused and seen.manifest.key == work.key
    return seen if is_same else None
