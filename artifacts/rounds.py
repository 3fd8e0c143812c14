"""How an update's manifest names what it read: one rollout and its scores for each round.

rollout, scores          the first round's
rollout.2, scores.2      the second's, and so on
policy                   what was updated
"""

from collections.abc import Mapping, Sequence
from itertools import count

from artifacts.manifests import Ref


def rounds_to_inputs(rounds: Sequence[tuple[Ref, Ref]]) -> dict[str, Ref]:
    """The inputs of an update that reads these pairs of rollout and scores, in order."""
    return {
        in_round(name, number): ref
        for number, pair in enumerate(rounds, start=1)
        for name, ref in zip(("rollout", "scores"), pair, strict=True)
    }


def inputs_to_rounds(inputs: Mapping[str, Ref]) -> list[tuple[Ref, Ref]]:
    """The pairs of rollout and scores among an update's ``inputs``, in order."""
    rounds = []
    for number in count(1):
        if in_round("rollout", number) not in inputs:
            break
        rounds.append((inputs[in_round("rollout", number)], inputs[in_round("scores", number)]))
    return rounds


def read_folders(inputs: Mapping[str, Ref]) -> set[str]:
    """Folders of the rollouts and scores among an update's ``inputs``."""
    return {ref.path for pair in inputs_to_rounds(inputs) for ref in pair}


def in_round(name: object, number: int) -> str:
    """``name`` in round ``number``: ``rollout``, ``rollout.2``; and iteration ``3``, ``3.2``."""
    return str(name) if number == 1 else f"{name}.{number}"
