"""How far a run has come, as this process knows it; and from there, what each stage's work is.

Whatever is known was found committed, or has been committed since. What :meth:`Standing.recall`
found is not looked for again: what is committed stays as it is.
"""

from collections.abc import Iterator

from artifacts.ahead import ReadAhead
from artifacts.errors import IntegrityError
from artifacts.manifests import Ref
from artifacts.rounds import in_round
from artifacts.runs import has_commit
from artifacts.store import Store
from flows.evaluation import Evaluation
from flows.iteration import Iteration, Round, next_groups
from flows.listener import Listener, Silent
from flows.plan import Plan
from flows.pools import reference_identity
from flows.revisions import Run, plan_at, revision_at
from stages.contract import Committed, StageError, Work, find
from stages.rollout import run as rollout_stage
from stages.rollout.prompts import PromptSet, prepare, prompt_work
from stages.rollout.worker import PolicyName
from stages.score import run as score_stage
from stages.update import run as update_stage
from stages.update.critic_name import CriticName, critic_after
from stages.update.trainers import is_rebuildable, policy_work

# Iterations read ahead at once: enough to keep every reader busy, and little to have read in vain.
_READ_AHEAD = 64


class Standing:
    """See the module's docstring.

    Attributes:
        history: the updates of the iterations that are finished, in order.
        iterations: what each iteration has committed, as far as it was looked at.
    """

    def __init__(self, run: Run, report: Listener | None = None) -> None:
        self.run, self.plan, self.config, self.store = run, run.plan, run.plan.config, run.store
        self.report: Listener = report or Silent()
        self.history: list[Committed] = []
        self.iterations: dict[int, Iteration] = {}
        self._prompts: dict[str, PromptSet] = {}
        self._evaluations: dict[int, Evaluation] = {}

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

    def policy_name(self) -> PolicyName:
        """The policy that rollouts of the next iteration sample with."""
        if not self.history:
            return PolicyName(0, self.plan.model_digest)
        return PolicyName(len(self.history), self.history[-1].manifest.outcome["weights_digest"])

    def critic_name(self, iteration: int) -> CriticName | None:
        """The critic that scores ``iteration`` and is taught by its update; None without one."""
        base = self.plan_at(iteration).critic_digest
        return None if base is None else critic_after(self._before(iteration), base)

    def rounds(self, iteration: int) -> Iterator[int]:
        """Numbers of the iteration's rounds, from 1.

        A round is to be sampled and scored before the next is asked for: what its scores hold
        decides whether there is one.
        """
        number = 1
        while self._groups(iteration, number):
            yield number
            number += 1

    def open_round(self, iteration: int) -> int:
        """The first of the iteration's rounds that isn't whole; the last where all are."""
        number, made = 1, self._at(iteration).rounds
        for number in self.rounds(iteration):
            if number > len(made) or made[number - 1].scores is None:
                break
        return number

    def rollout_work(self, iteration: int, number: int = 1) -> Work:
        """The description of a round's rollout; all before it is to be known."""
        config, before = self.plan_at(iteration).config, self._before(iteration)
        policy = None if config.data.has_pairs else before.ref if before else self.base
        return rollout_stage.rollout_work(
            iteration,
            config.data,
            config.rollout,
            config.seed,
            self.prompts(iteration).ref,
            policy,
            self._start(iteration, number),
            self._groups(iteration, number),
            number,
        )

    def score_work(self, iteration: int, number: int = 1) -> Work:
        """The description of a round's scoring."""
        plan, critic = self.plan_at(iteration), self.critic_name(iteration)
        values = None
        if critic is not None:
            before = self._before(iteration) if critic.version else None
            made_by = before.ref if before else Ref("critic", critic.base)
            values = made_by, {**critic.identity(), "dtype": plan.config.update.dtype}
        return score_stage.score_work(
            iteration,
            plan.config.score,
            plan.functions,
            self._round(iteration, number).rollout,
            reference_identity(plan),
            values,
        )

    def update_work(self, iteration: int) -> Work:
        """The description of an iteration's update."""
        config, before = self.plan_at(iteration).config, self._before(iteration)
        return update_stage.update_work(
            iteration,
            config.update,
            config.score.on_null,
            config.rollout.temperature,
            config.total_steps,
            self._whole_rounds(iteration),
            before.ref if before else self.base,
            self.plan_at(iteration).update_functions,
            before,
            config.data.batch_size if config.rollout.fills_batch else None,
            self.critic_name(iteration),
        )

    def find_snapshot(self, update: Committed) -> Committed | None:
        """The committed snapshot of the policy that ``update`` made.

        One that has lost a file counts as none: it is made again, where it can be.
        """
        try:
            return find(self.store, policy_work(update))
        except IntegrityError as error:
            self.report.say("snapshot", state="not whole", error=error)
            return None

    def evaluates(self, version: int) -> bool:
        """Whether policy ``version`` is to be evaluated."""
        evaluate = self.config.evaluate
        return evaluate is not None and evaluate.is_due(version, self.config.iterations)

    def find_evaluation(self, version: int) -> Committed | None:
        """The committed evaluation of policy ``version``, as the configuration of now has it."""
        policy = self.history[version - 1].ref if version else self.base
        return self.evaluation(version).find(version, policy)

    def evaluation(self, version: int) -> Evaluation:
        """The evaluation that is configured, sampling otherwise as policy ``version`` was made.

        Raises:
            StageError: none is.
        """
        if self.config.evaluate is None:
            raise StageError("the run has no held-out data: set evaluate.data.path")
        revision = revision_at(self.run.revisions, max(version, 1))
        if revision.first not in self._evaluations:
            made = Evaluation(self.store, revision.plan, self.config.evaluate)
            self._evaluations[revision.first] = made
        return self._evaluations[revision.first]

    def is_complete(self) -> bool:
        """Whether nothing is left to make, snapshots and evaluations included. Reads alone."""
        iterations = self.config.iterations
        if not has_commit(self.store, iterations, "update"):  # one look, where there is much to do
            return False
        is_done = self.recall_finished() == iterations and all(
            self.find_snapshot(update) or not is_rebuildable(self.store, self.history[:iteration])
            for iteration, update in enumerate(self.history, start=1)
            if self._is_kept(iteration)
        )
        is_done = is_done and all(
            self.find_evaluation(version) or not is_rebuildable(self.store, self.history[:version])
            for version in range(iterations + 1)
            if self.evaluates(version)
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
        seen.rounds.clear()
        for number in self.rounds(iteration):
            if not self._recall_round(iteration, number, store):
                return seen
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

    def _recall_round(self, iteration: int, number: int, store: Store) -> bool:
        """Remember a round as far as it is committed. Returns whether it is whole."""
        rollout = find(store, self.rollout_work(iteration, number))
        if rollout is None:
            return False
        rounds = self._at(iteration).rounds
        rounds[number - 1 :] = [Round(rollout)]
        scores = score_stage.find_scores(store, self.score_work(iteration, number))
        if scores is not None:
            rounds[-1] = Round(rollout, scores)
        return scores is not None

    def _recall_to(self, last: int) -> Iterator[Iteration]:
        """Recall the iterations after the history, up to ``last``, in batches that double."""
        first, count = len(self.history) + 1, 1
        while first <= last:
            batch = range(first, min(first + count, last + 1))
            ahead = ReadAhead(self.store, batch)
            for iteration in batch:
                yield self.recall(iteration, ahead)
            first, count = first + count, min(2 * count, _READ_AHEAD)

    def _before(self, iteration: int) -> Committed | None:
        """The update before ``iteration``."""
        return self.history[iteration - 2] if iteration > 1 else None

    def _is_kept(self, iteration: int) -> bool:
        is_last = iteration == self.config.iterations
        return is_last or iteration % self.config.checkpoint.every == 0

    def _prompt_work(self, iteration: int) -> Work:
        plan = self.plan_at(iteration)
        return prompt_work(
            plan.config.data,
            plan.data_digest,
            plan.tokenizer_digest,
            plan.max_prompt_tokens,
            plan.config.rollout.max_new_tokens,
        )

    def _start(self, iteration: int, number: int) -> list[int]:
        """Prompts drawn of each source where the round before ended; [] for none."""
        if number > 1:
            before = self._round(iteration, number - 1)
        elif iteration == 1 or self._takes_other_data(iteration):
            return []
        else:
            before = self._at(iteration - 1).rounds[-1]
        return list(before.rollout.manifest.outcome["next_positions"])

    def _takes_other_data(self, iteration: int) -> bool:
        """Whether the data is another than before, and gone through from its beginning."""
        return self.plan_at(iteration).data_digest != self.plan_at(iteration - 1).data_digest

    def _at(self, iteration: int) -> Iteration:
        return self.iterations.setdefault(iteration, Iteration())

    def _groups(self, iteration: int, number: int) -> range:
        """Indices of the groups of a round; empty where there is no such round."""
        before = self._at(iteration).rounds[: number - 1]
        if len(before) < number - 1:
            raise _missing(iteration, number - 1, "rollout")
        return next_groups(self.plan_at(iteration).config, before)

    def _recalled(self, iteration: int, stage: str, number: int, work: Work) -> Committed | None:
        """What was recalled, where it is what ``work`` gives; what was made here is looked for."""
        seen = self._at(iteration).outputs().get(in_round(stage, number))
        is_same = seen is not None and seen.was_reused and seen.manifest.key == work.key
        return seen if is_same else None

    def _round(self, iteration: int, number: int) -> Round:
        rounds = self._at(iteration).rounds
        if number > len(rounds):
            raise _missing(iteration, number, "rollout")
        return rounds[number - 1]

    def _whole_rounds(self, iteration: int) -> list[tuple[Ref, Ref]]:
        """Rollout and scores of each round. Raises StageError where something is missing."""
        refs = []
        for number in self.rounds(iteration):
            made = self._round(iteration, number)
            if made.scores is None:
                raise _missing(iteration, number, "scores")
            refs.append((made.rollout.ref, made.scores.ref))
        return refs


def _missing(iteration: int, number: int, what: str) -> StageError:
    place = in_round(iteration, number)
    return StageError(f"iteration {place} has no committed {what}: run that stage first")
