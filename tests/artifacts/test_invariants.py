"""Each invariant of a committed run, broken alone: digests are right, and verification says what.

The run is whole but for one planted fault, and is digested again from there on: nothing but the
invariant can find it.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from artifacts.keys import key_of
from artifacts.manifests import Shard, read_manifest
from artifacts.schemas import ROWS_VERSION
from artifacts.shards import read_shard, write_file, write_table
from artifacts.store import Store
from artifacts.verification import committed_folders, verify
from flows.cli import main
from plain_run import manifests, plain_plan, train

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    # Several shards a stage, a sample without a reward, two steps an iteration, a snapshot each.
    store = Store(str(folder / "run"))
    train(store, plain_plan(folder, checkpoint={"every": 1}))
    assert verify(store).problems == []
    kinds = [manifest.kind for manifest in manifests(store).values()]
    assert sorted(kinds) == sorted([*["policy", "rollouts", "scores", "update"] * 2, "prompts"])
    return folder / "run"


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Store:
    return Store(str(shutil.copytree(whole, tmp_path / "run")))


def folder_of(store: Store, kind: str, iteration: int) -> str:
    found = [folder for folder, m in manifests(store).items() if m.kind == kind]
    return sorted(found)[iteration - 1]


def body_of(store: Store, folder: str) -> dict[str, Any]:
    return dict(json.loads(store.read(f"{folder}/manifest.json")))


def write_body(store: Store, folder: str, body: dict[str, Any]) -> None:
    body["digest"] = key_of(body["content"])
    store.put(f"{folder}/manifest.json", json.dumps(body).encode())


def digest_again(store: Store) -> None:
    """Give every manifest the digests that its inputs have now."""
    folders = list(committed_folders(store))
    for _ in folders:  # as long as the longest chain could be
        digests = {folder: body_of(store, folder)["digest"] for folder in folders}
        for folder in folders:
            body = body_of(store, folder)
            for ref in body["content"]["inputs"].values():
                ref["digest"] = digests.get(ref["path"], ref["digest"])
            write_body(store, folder, body)


def replace_shard(store: Store, folder: str, number: int, shard: Shard | None) -> None:
    """Put ``shard``, or none, in the place of the manifest's ``number``-th."""
    body = body_of(store, folder)
    shards = body["content"]["shards"]
    shards[number : number + 1] = [] if shard is None else [vars(shard)]
    totals = {name: sum(s[name] for s in shards) for name in ("rows", "bytes")}
    body["content"]["totals"] = totals
    write_body(store, folder, body)
    digest_again(store)


def plant(store: Store, folder: str, stem: str, change: Callable[[Rows], None], **metadata) -> None:
    """Change the rows of the first shard whose name begins with ``stem``."""
    shards = read_manifest(store, folder).shards
    number = next(n for n, shard in enumerate(shards) if shard.name.startswith(stem))
    table = read_shard(store, folder, shards[number])
    rows = table.to_pylist()
    change(rows)
    encoded = {name.encode(): value for name, value in metadata.items()}
    schema = table.schema.with_metadata({**table.schema.metadata, **encoded})
    changed = pa.Table.from_pylist(rows, schema=schema)
    stem = shards[number].name.partition(".")[0]
    replace_shard(store, folder, number, write_table(store, folder, stem, changed))


def column(name: str, value: Any, at: int | slice = 0) -> Callable[[Rows], None]:
    """Set ``name`` in one row or several."""

    def change(rows: Rows) -> None:
        for row in rows[at] if isinstance(at, slice) else [rows[at]]:
            row[name] = value(row) if callable(value) else value

    return change


def first_known(change: Callable[[dict[str, Any]], None]) -> Callable[[Rows], None]:
    return lambda rows: change(next(row for row in rows if row["weight"] == 1.0))


def turned(rows: Rows) -> None:
    rows[0]["sample_id"], rows[1]["sample_id"] = rows[1]["sample_id"], rows[0]["sample_id"]


EVERY = slice(None)
FAULTS: dict[str, tuple[str, str, Callable[[Rows], None], str]] = {
    "a log-prob above 0": (
        "rollouts", "shard-00000",
        column("logprobs", lambda row: [0.5, *row["logprobs"][1:]]),
        "logprobs holds a number above 0",
    ),
    "a log-prob that is NaN": (
        "rollouts", "shard-00001",
        column("logprobs", lambda row: [float("nan"), *row["logprobs"][1:]]),
        "logprobs holds NaN or an infinity",
    ),
    "a log-prob too few": (
        "rollouts", "shard-00000",
        column("logprobs", lambda row: row["logprobs"][1:]),
        "logprobs has not one entry a response token",
    ),
    "no mask": (
        "rollouts", "shard-00000", column("loss_mask", None),
        "loss_mask has not one entry a response token",
    ),
    "a mask of 2": (
        "rollouts", "shard-00000",
        column("loss_mask", lambda row: [2] * len(row["loss_mask"])),
        "loss_mask holds another number than 0 and 1",
    ),
    "a mask of nothing": (
        "rollouts", "shard-00001",
        column("loss_mask", lambda row: [0] * len(row["loss_mask"]), 1),
        "a response has tokens, and loss_mask none of the policy's",
    ),
    "an unknown end": (
        "rollouts", "shard-00000", column("finish_reason", "abort"),
        "a finish_reason is none of stop, length, given",
    ),
    "no end": (
        "rollouts", "shard-00000", column("finish_reason", None),
        "a finish_reason is none of stop, length, given",
    ),
    "one seed twice": (
        "rollouts", "shard-00000", column("seed", 7, EVERY), "a seed stands twice",
    ),
    "weights of another policy": (
        "rollouts", "shard-00000", column("policy_digest", "f" * 64),
        f"its policy_digest is {{policy}}, {'f' * 64}, and its policy's is {{policy}}",
    ),
    "a version of another policy": (
        "rollouts", "shard-00001", column("policy_version", 7),
        "its policy_version is 1, 7, and its policy's is 1",
    ),
    "a reward that is NaN": (
        "scores", "shard-00000", column("reward", float("nan")), "reward holds NaN or an infinity",
    ),
    "a component that is infinite": (
        "scores", "shard-00000", column("reward.share", float("-inf")),
        "reward.share holds NaN or an infinity",
    ),
    "token rewards of another length": (
        "scores", "shard-00000", column("token_rewards", [1.0] * 99),
        "token_rewards has not one entry a response token",
    ),
    "a reference log-prob above 0": (
        "scores", "shard-00001", column("reference_logprobs", [1e-3] * 99),
        "reference_logprobs holds a number above 0",
    ),
    "scores of other samples": (
        "scores", "shard-00000", turned, "its samples are not those of its rollout, in order",
    ),
    "scores in other groups": (
        "scores", "shard-00000", column("group_id", "elsewhere"),
        "its groups are not those of its rollout",
    ),
    "an advantage that is infinite": (
        "update", "advantages", first_known(lambda row: row.update(advantage=float("inf"))),
        "advantage holds NaN or an infinity",
    ),
    "no advantage at weight 1": (
        "update", "advantages", first_known(lambda row: row.update(advantage=None)),
        "advantage is not null exactly where weight is 0",
    ),
    "an advantage at weight 0": (
        "update", "advantages", first_known(lambda row: row.update(weight=0.0)),
        "advantage is not null exactly where weight is 0",
    ),
    "half a weight": (
        "update", "advantages", first_known(lambda row: row.update(weight=0.5)),
        "weight holds another number than 0 and 1",
    ),
    "token advantages of another length": (
        "update", "advantages", first_known(lambda row: row.update(token_advantages=[0.0] * 99)),
        "token_advantages has not one entry a response token",
    ),
    "a sample of another step": (
        "update", "advantages", column("step", 1),
        "a sample was used by a step that is none of its own",
    ),
    "a trained sample of no step": (
        "update", "advantages", first_known(lambda row: row.update(step=None)),
        "a sample of weight 1 was used by no step",
    ),
    "advantages of other samples": (
        "update", "advantages", turned, "its samples are not those of its rollout, in order",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_verify_names_the_one_fault_of_an_otherwise_whole_run(
    store: Store, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, stem, change, words = FAULTS[name]
    folder = folder_of(store, kind, 2)
    update = read_manifest(store, folder_of(store, "update", 1))
    plant(store, folder, stem, change)
    wanted = f"{folder}: {words.format(policy=update.outcome['weights_digest'])}"
    problems = verify(store).problems
    if name == "a reference log-prob above 0":  # where there was none: of another length too
        problems = problems[:1]
    assert problems == [wanted]
    monkeypatch.setattr(sys, "argv", ["ratchet", "verify", store.url])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    assert wanted in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("change", "shown"),
    [({3: 4, 4: 5}, "4, 5"), ({4: 5}, "3, 5"), ({3: 1, 4: 2}, "1, 2")],
    ids=["a step left out before", "a step left out between", "counted anew"],
)
def test_verify_names_optimizer_steps_that_do_not_go_on(
    store: Store, change: dict[int, int], shown: str
) -> None:
    folder = folder_of(store, "update", 2)

    def renumber(rows: Rows) -> None:
        for row in rows:
            row["step"] = change.get(row["step"], row["step"])

    plant(store, folder, "advantages", renumber)
    plant(store, folder, "steps", renumber)
    problems = [p for p in verify(store).problems if "its optimizer steps" in p]
    assert problems == [
        f"{folder}: its optimizer steps are {shown}, and 3 is where they go on from"
    ]


@pytest.mark.parametrize(
    ("kind", "field", "value", "words"),
    [
        ("update", "policy_version", 7, "it makes policy 7 of policy 1"),
        ("prompts", "rows", [4], "it has 3 prompts, and says 4"),
    ],
)
def test_verify_names_an_outcome_that_its_rows_deny(
    store: Store, kind: str, field: str, value: Any, words: str
) -> None:
    folder = folder_of(store, kind, 2 if kind == "update" else 1)
    body = body_of(store, folder)
    body["content"]["outcome"][field] = value
    write_body(store, folder, body)
    digest_again(store)
    assert f"{folder}: {words}" in verify(store).problems


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"step": 3, "taken": 3}, "its state is of step 3, and its update ended at step 4"),
        ({"step": 4, "taken": 5}, "its state has 5 steps taken of 4"),
    ],
)
def test_verify_names_a_snapshot_whose_state_is_of_another_step(
    store: Store, state: dict[str, int], words: str
) -> None:
    folder = folder_of(store, "policy", 2)
    shards = read_manifest(store, folder).shards
    number = next(n for n, shard in enumerate(shards) if shard.name.startswith("state."))
    data = json.dumps(state).encode()
    replace_shard(store, folder, number, write_file(store, folder, "state", "json", data, 1))
    assert verify(store).problems == [f"{folder}: {words}"]


@pytest.mark.parametrize("part", ["weights", "exp_avg", "exp_avg_sq", "state"])
def test_verify_names_the_part_that_a_snapshot_lacks(store: Store, part: str) -> None:
    folder = folder_of(store, "policy", 1)
    stems = [
        s.name.partition(".")[0].partition("-")[0] for s in read_manifest(store, folder).shards
    ]
    replace_shard(store, folder, stems.index(part), None)
    assert verify(store).problems == [f"{folder}: it has no {part}"]


def test_verify_names_a_snapshot_of_other_weights_than_its_update_made(store: Store) -> None:
    folder, update = folder_of(store, "policy", 2), folder_of(store, "update", 2)
    body = body_of(store, folder)
    body["content"]["identity"]["weights_digest"] = "f" * 64
    write_body(store, folder, body)
    assert verify(store).problems == [f"{folder}: its weights are not those of {update}"]


def test_verify_names_rows_of_a_later_version(store: Store) -> None:
    folder = folder_of(store, "rollouts", 2)
    plant(store, folder, "shard-00000", lambda rows: None, **{"ratchet.version": "99"})
    (problem,) = verify(store).problems
    assert problem.startswith(f"{folder}/shard-00000.")
    assert (
        f"has rows of version 99, and this version of Ratchet reads up to {ROWS_VERSION}" in problem
    )


def test_verify_names_rows_of_another_kind(store: Store) -> None:
    rollouts, scores = folder_of(store, "rollouts", 2), folder_of(store, "scores", 2)
    body = body_of(store, rollouts)
    shard = read_manifest(store, scores).shards[0]
    store.put(f"{rollouts}/{shard.name}", store.read(f"{scores}/{shard.name}"))
    body["content"]["shards"] = [vars(shard)]
    write_body(store, rollouts, body)
    digest_again(store)
    assert any(
        f"{rollouts}: its content is not of kind rollouts" in p for p in verify(store).problems
    )
