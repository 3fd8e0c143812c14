"""What an iteration has committed, round by round, and whether another round follows.

A round is a rollout and its scores. Most iterations have one. Where rounds fill the batch
(``rollout.max_rounds``, ``rollout.oversample``), what is drawn next follows from what is committed:
from where the round before ended in the data, and how many groups with spread its scores hold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from artifacts.manifests import Manifest, Ref, read_manifest
from artifacts.rounds import in_round, inputs_to_rounds
from artifacts.runs import committed
from artifacts.store import Store
from artifacts.tombstones import is_retired
from flows.config import Config
from stages.contract import Committed, StageError
from stages.rollout.selection import num_to_draw


@dataclass(frozen=True)
class Round:
    """A rollout, and once it is scored, its scores."""

    rollout: Committed
    scores: Committed | None = None


@dataclass
class Iteration:
    """What an iteration has committed so far."""

    rounds: list[Round] = field(default_factory=list)
    update: Committed | None = None
    evaluation: Committed | None = None  # of the policy that it made, apart from training

    def outputs(self) -> dict[str, Committed]:
        """All of it by stage and round: rollout, score, rollout.2, score.2, …, update."""
        found: dict[str, Committed] = {}
        for number, made in enumerate(self.rounds, start=1):
            found[in_round("rollout", number)] = made.rollout
            if made.scores is not None:
                found[in_round("score", number)] = made.scores
        return found if self.update is None else {**found, "update": self.update}

    def by_stage(self) -> dict[str, list[Manifest]]:
        """The manifests of each stage that has any, one a round."""
        stages: dict[str, list[Manifest]] = {}
        for name, made in self.outputs().items():
            stages.setdefault(name.partition(".")[0], []).append(made.manifest)
        return stages


def next_groups(config: Config, rounds: Sequence[Round]) -> range:
    """Indices of the groups that the round after ``rounds`` draws; empty where none follows.

    Raises:
        StageError: what follows isn't known yet, as a round is not scored.
    """
    rollout = config.rollout
    if len(rounds) >= rollout.max_rounds:  # whatever their scores hold
        return range(0)
    found = [_num_with_spread(made, config.score.on_null) for made in rounds]
    count = num_to_draw(config.data.batch_size, found, rollout.max_rounds, rollout.oversample)
    first = sum(made.rollout.manifest.identity["groups"] for made in rounds)
    return range(first, first + count)


def _num_with_spread(made: Round, on_null: str) -> int:
    if made.scores is None:
        raise StageError(
            f"{made.rollout.folder} has no committed scores: run the score stage first"
        )
    return int(made.scores.manifest.outcome["groups_with_spread"][on_null])


def newest(store: Store, iteration: int, stage: str) -> tuple[str, Manifest] | None:
    """Folder and manifest of the stage's latest commit in ``iteration``.

    Where there are several, one whose files ``ratchet gc`` retired comes last.
    """
    return _latest(store, committed(store, iteration, stage))


def read_iteration(store: Store, iteration: int) -> Iteration:
    """What lies in the store of an iteration, from manifests alone.

    Of several commits the latest counts: its update, and the rounds which that was made of; or
    as far as there is none, the rollout, its scores, and the rounds that go on from them.
    """
    if update := newest(store, iteration, "update"):
        refs = inputs_to_rounds(update[1].inputs)
        rounds = [Round(_at(store, rollout), _at(store, scores)) for rollout, scores in refs]
        return Iteration(rounds, Committed(*update, was_reused=True))
    rollouts, scores = (committed(store, iteration, stage) for stage in ("rollout", "score"))
    rounds = []
    while found := _latest(store, [r for r in rollouts if _follows(r[1], rounds)]):
        scored = _latest(store, [s for s in scores if s[1].inputs["rollout"].path == found[0]])
        made = [Committed(*each, was_reused=True) for each in (found, scored) if each]
        rounds.append(Round(*made))
    return Iteration(rounds)


def _at(store: Store, ref: Ref) -> Committed:
    return Committed(ref.path, read_manifest(store, ref.path, ref.digest), was_reused=True)


def _latest(store: Store, found: Sequence[tuple[str, Manifest]]) -> tuple[str, Manifest] | None:
    if len(found) > 1:
        found = [pair for pair in found if not is_retired(store, pair[0])] or found
    return max(found, key=lambda pair: pair[1].provenance.get("end", 0.0)) if found else None


def _follows(rollout: Manifest, rounds: Sequence[Round]) -> bool:
    """Whether ``rollout`` is the round after ``rounds``, sampled in the same way."""
    if not rounds:
        return bool(rollout.identity.get("round", 1) == 1)
    before = rounds[-1].rollout.manifest
    return (
        rollout.identity.get("round", 1) == len(rounds) + 1
        and rollout.inputs == before.inputs
        and rollout.identity["start"] == before.outcome["next_positions"]
        and _sampling(rollout.identity) == _sampling(before.identity)
    )


def _sampling(identity: Mapping[str, Any]) -> dict[str, Any]:
    own = ("round", "first_group", "groups", "start")
    return {name: value for name, value in identity.items() if name not in own}
