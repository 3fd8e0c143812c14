"""What must hold of a committed artifact beyond its digests, a file for each kind.

Each ``problems`` gets the store, the manifest's folder, the manifest, and a table for each of its
shards (None for one that holds no rows), all of them whole by their digests. It yields a sentence
for each thing that is wrong. An input that can't be read is not repeated here: it is named where
inputs are checked.
"""

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from artifacts.invariants import evaluation, policy, prompts, rollouts, scores, update
from artifacts.manifests import Manifest
from artifacts.store import Store

Problems = Callable[[Store, str, Manifest, Sequence[pa.Table | None]], Iterator[str]]

PROBLEMS: dict[str, Problems] = {
    "evaluation": evaluation.problems,
    "policy": policy.problems,
    "prompts": prompts.problems,
    "rollouts": rollouts.problems,
    "scores": scores.problems,
    "update": update.problems,
}


def problems_of(
    store: Store, folder: str, manifest: Manifest, tables: Sequence[pa.Table | None]
) -> Iterator[str]:
    """What is wrong with the artifact in ``folder``; nothing of a kind that is not known."""
    if manifest.kind in PROBLEMS:
        yield from PROBLEMS[manifest.kind](store, folder, manifest, tables)
