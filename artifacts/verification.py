"""Everything that is committed in a run, recomputed: digests, row counts, inputs, invariants."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import IntegrityError
from artifacts.manifests import Manifest, Ref, Shard, read_manifest
from artifacts.runs import is_committed
from artifacts.shards import read_file, read_shard
from artifacts.store import Store
from artifacts.tombstones import read_tombstone


@dataclass(frozen=True)
class Verification:
    """What was looked at, and what is wrong with it.

    Attributes:
        retired: how many of the manifests have had their files removed by ``ratchet gc``.
        files, bytes: of the others.
    """

    manifests: int
    retired: int
    files: int
    bytes: int
    problems: list[str]


def verify(store: Store) -> Verification:
    """Read every committed byte of the run that is to be there, and check it."""
    num_retired = num_files = num_bytes = 0
    folders = list(committed_folders(store))
    problems: list[str] = []
    for folder in folders:
        try:
            manifest = read_manifest(store, folder)
            is_retired = _is_retired(store, folder, manifest)
        except ValueError as error:
            problems.append(str(error))
            continue
        if is_retired:
            num_retired += 1
            problems += _problems_of_inputs(store, folder, manifest)
            continue
        num_files += len(manifest.shards)
        num_bytes += sum(shard.bytes for shard in manifest.shards)
        problems += _problems_of(store, folder, manifest)
    return Verification(len(folders), num_retired, num_files, num_bytes, problems)


def committed_folders(store: Store) -> Iterator[str]:
    """Every folder of the run that holds a manifest."""
    for top in store.names(""):
        if top == "prompts":
            parents = [top]
        elif top == "policy" or top.startswith("iteration-"):
            parents = [f"{top}/{name}" for name in store.names(top)]
        else:
            continue
        for parent in parents:
            folders = (f"{parent}/{name}" for name in store.names(parent))
            yield from (folder for folder in folders if is_committed(store, folder))


def _is_retired(store: Store, folder: str, manifest: Manifest) -> bool:
    tombstone = read_tombstone(store, folder)
    if tombstone is not None and tombstone.files != manifest.shards:
        raise IntegrityError(folder, "those of its manifest", "others", "retired files")
    return tombstone is not None


def _problems_of_inputs(store: Store, folder: str, manifest: Manifest) -> Iterator[str]:
    for name, ref in manifest.inputs.items():
        yield from _input_problems(store, folder, name, ref)


def _problems_of(store: Store, folder: str, manifest: Manifest) -> Iterator[str]:
    yield from _problems_of_inputs(store, folder, manifest)
    tables = []
    for shard in manifest.shards:
        try:
            tables.append(_read(store, folder, shard))
        except IntegrityError as error:
            yield str(error)
    if len(tables) == len(manifest.shards):
        for problem in INVARIANTS.get(manifest.kind, _none)(store, manifest, tables):
            yield f"{folder}: {problem}"


def _read(store: Store, folder: str, shard: Shard) -> pa.Table | None:
    if shard.name.endswith(".arrow"):
        return read_shard(store, folder, shard)
    read_file(store, folder, shard)
    return None


def _input_problems(store: Store, folder: str, name: str, ref: Ref) -> Iterator[str]:
    if ref.path == "model":  # lies outside the run, and is checked when it is loaded
        return
    try:
        read_manifest(store, ref.path, ref.digest)
    except (OSError, ValueError) as error:
        yield f"{folder}: its input {name}: {error}"


Invariant = Callable[[Store, Manifest, list[pa.Table]], Iterator[str]]


def _none(store: Store, manifest: Manifest, tables: list[pa.Table]) -> Iterator[str]:
    yield from ()


def _rollouts(store: Store, manifest: Manifest, tables: list[pa.Table]) -> Iterator[str]:
    table = pa.concat_tables(tables)
    tokens = pc.list_value_length(table["response_ids"])
    for name in ("logprobs", "loss_mask"):
        if pc.list_value_length(table[name]) != tokens:
            yield f"{name} has not one entry a response token"
    if not _all_finite(pc.list_flatten(table["logprobs"])):
        yield "logprobs holds NaN or an infinity"
    if len(set(table["sample_id"].to_pylist())) != table.num_rows:
        yield "a sample_id stands twice"
    wanted = manifest.identity.get("samples_per_prompt")
    sizes = Counter(table["group_id"].to_pylist())
    short = [group for group, size in sizes.items() if wanted is not None and size != wanted]
    if short:
        yield f"group {short[0]} has {sizes[short[0]]} samples, not {wanted}"


def _scores(store: Store, manifest: Manifest, tables: list[pa.Table]) -> Iterator[str]:
    table = pa.concat_tables(tables)
    for name in table.column_names:
        is_reward = name.startswith("reward") or name == "token_rewards"
        if is_reward and not _all_finite(table[name]):
            yield f"{name} holds NaN or an infinity"
    try:
        source = manifest.inputs["rollout"]
        rollout = read_manifest(store, source.path, source.digest)
        rows = [read_shard(store, source.path, shard) for shard in rollout.shards]
    except (OSError, ValueError):
        return  # named where the input itself is checked
    rolled = pa.concat_tables(rows)
    if rolled["sample_id"] != table["sample_id"]:
        yield "its samples are not those of its rollout, in order"
    elif "token_rewards" in table.column_names:
        lengths = pc.list_value_length(table["token_rewards"])
        if pc.any(pc.not_equal(lengths, pc.list_value_length(rolled["response_ids"]))).as_py():
            yield "token_rewards has not one entry a response token"


def _update(store: Store, manifest: Manifest, tables: list[pa.Table]) -> Iterator[str]:
    for table in tables:
        for name in table.column_names:
            is_read = name in ("advantage", "token_advantages", "token_returns")
            if is_read and not _all_finite(table[name]):
                yield f"{name} holds NaN or an infinity"


def _all_finite(column: pa.ChunkedArray | pa.Array) -> bool:
    """Whether every value that is not null is finite, those in lists too."""
    values = pc.list_flatten(column) if pa.types.is_list(column.type) else column
    return pc.all(pc.is_finite(values)).as_py() is not False


INVARIANTS: dict[str, Invariant] = {"rollouts": _rollouts, "scores": _scores, "update": _update}
