"""The golden run, committed by an earlier version, opens for ever and says what it said.

``tests/golden/make.py`` made it. Nothing in it is ever changed; a new version adds a folder.
"""

from pathlib import Path

import pyarrow as pa
import pytest

from artifacts import schemas
from artifacts.manifests import Manifest, Ref, read_manifest
from artifacts.runs import committed
from artifacts.shards import read_shard, read_table
from artifacts.store import Store
from artifacts.verification import verify
from stages.ledger import read_ledger
from stages.update.snapshot import read_snapshot

GOLDEN = Path(__file__).parent.parent / "golden" / "v1"

PROMPTS = "prompts/56b48eac81921a3d"
ROLLOUT = "iteration-000001/rollout/c14cf617ed4d030e"
SCORES = "iteration-000001/score/4c6f42fa875a5740"
UPDATE = "iteration-000001/update/9529f140f4837d02"
POLICY = "policy/000001/59c27be76a433e82"

DIGESTS = {
    PROMPTS: "76fd57432a80e38a3f3f7ecc744525a3604f972348cafa7d8b90399496ae1b22",
    ROLLOUT: "395df6a407f89173160af96b0e6dd9c139bb9827600736c402ff62a4bc4b5eb2",
    SCORES: "d7441c7d6236b6eed0473b24170521881c9c6e09151e99d79f75db0cfbf9a9c2",
    UPDATE: "6e14780e6c3a8da3fd62833c2e40e2bdde57e207f2998fba89c53f8d8ff22f05",
    POLICY: "7f8444a0d28c79a4be80d7bf4a715f0aada5a19acea61ea00ac90a90b797f9bc",
}

SAMPLE_IDS = ["000001-00000-000", "000001-00000-001", "000001-00001-000", "000001-00001-001"]


@pytest.fixture
def golden() -> Store:
    return Store(str(GOLDEN))


def table_of(store: Store, folder: str) -> pa.Table:
    return read_table(store, folder, read_manifest(store, folder, DIGESTS[folder]))


@pytest.mark.parametrize("folder", DIGESTS)
def test_golden_manifest_opens_and_has_its_recorded_digest(golden: Store, folder: str) -> None:
    manifest = read_manifest(golden, folder)
    assert manifest.digest == DIGESTS[folder]
    assert manifest.provenance["host"] == "golden"
    assert len(read_ledger(golden, folder, manifest.provenance["ledger"])) == 1


def test_golden_run_verifies(golden: Store) -> None:
    found = verify(golden)
    assert found.problems == []
    assert found.manifests == len(DIGESTS)


def test_golden_inputs_name_the_golden_manifests(golden: Store) -> None:
    found: dict[str, Manifest] = {folder: read_manifest(golden, folder) for folder in DIGESTS}
    assert found[ROLLOUT].inputs["prompts"].path == PROMPTS
    assert found[SCORES].inputs["rollout"].path == ROLLOUT
    assert found[UPDATE].inputs["scores"].path == SCORES
    assert found[POLICY].inputs["update"].path == UPDATE
    for manifest in found.values():
        for ref in manifest.inputs.values():
            assert DIGESTS.get(ref.path, "c" * 64) == ref.digest


def test_golden_files_are_those_that_manifests_name(golden: Store) -> None:
    named = set()
    for folder in DIGESTS:
        manifest = read_manifest(golden, folder)
        names = [shard.name for shard in manifest.shards]
        names += ["manifest.json", manifest.provenance["ledger"]["name"]]
        named |= {f"{folder}/{name}" for name in names}
    files = {str(p.relative_to(GOLDEN)) for p in GOLDEN.rglob("*") if p.is_file()}
    assert files == named


def test_golden_iteration_lists_its_commits(golden: Store) -> None:
    stages = {"rollout": ROLLOUT, "score": SCORES, "update": UPDATE}
    found = {stage: [f for f, _ in committed(golden, 1, stage)] for stage in stages}
    assert found == {stage: [folder] for stage, folder in stages.items()}


def test_golden_prompts_hold_what_was_written(golden: Store) -> None:
    table = table_of(golden, PROMPTS)
    assert table["token_ids"].to_pylist() == [[1, 5, 6], [1, 6, 6], [1, 7, 6]]
    assert table["text"].to_pylist() == ["0+1=", "1+1=", "2+1="]
    assert table["ground_truth"].to_pylist() == ["1", "2", None]
    assert table["extra"][2].as_py() == '{"level": 2}'


def test_golden_rollouts_hold_what_was_written(golden: Store) -> None:
    table = table_of(golden, ROLLOUT)
    assert table["sample_id"].to_pylist() == SAMPLE_IDS
    assert table["response_ids"].to_pylist() == [[7, 2], [8, 2], [9, 9, 9], []]
    assert table["logprobs"].to_pylist() == [[-0.5, -0.25], [-1.5, -0.125], [-2.0, -3.0, -4.0], []]
    assert table["finish_reason"].to_pylist() == ["stop", "stop", "length", "stop"]
    assert table["seed"].to_pylist() == [2**62 - 1 - index for index in range(4)]
    assert table["text"][2].as_py() == "☃☃☃"
    manifest = read_manifest(golden, ROLLOUT)
    assert manifest.outcome == {"next_position": 2}
    assert manifest.identity["stop"] == ["\n", "☃"]
    assert manifest.metrics["rollout/none"] is None


def test_golden_scores_hold_what_was_written(golden: Store) -> None:
    table = table_of(golden, SCORES)
    assert table["sample_id"].to_pylist() == SAMPLE_IDS
    assert table["reward.exact"].to_pylist() == [1.0, 0.0, None, 0.5]
    assert table["reward"].to_pylist() == [2.0, 0.0, None, 1.0]
    assert [error is None for error in table["error"].to_pylist()] == [True, True, False, True]
    assert table["reference_logprobs"][1].as_py() == [-2.0, -0.625]
    manifest = read_manifest(golden, SCORES)
    assert manifest.functions == {"exact": "f" * 64}
    assert str(manifest.metrics["reward/nan"]) == "nan"
    assert manifest.metrics["reward/worst"] == float("-inf")


def test_golden_update_holds_what_was_written(golden: Store) -> None:
    manifest = read_manifest(golden, UPDATE)
    advantages, steps = (read_shard(golden, UPDATE, shard) for shard in manifest.shards)
    assert advantages["sample_id"].to_pylist() == SAMPLE_IDS
    assert advantages["advantage"].to_pylist() == [0.5, -0.5, None, 0.0]
    assert steps.to_pylist() == [{"step": 1, "name": "update/loss", "value": 0.125}]
    assert manifest.outcome == {"policy_version": 1, "weights_digest": "9" * 64}


def test_golden_policy_holds_what_was_written(golden: Store) -> None:
    snapshot = read_snapshot(golden, Ref(POLICY, DIGESTS[POLICY]))
    assert snapshot.state == {"step": 1, "taken": 1}
    for kind, scale in (("weights", 0.5), ("exp_avg", -0.25), ("exp_avg_sq", 0.125)):
        tensors = snapshot.tensors[kind]
        assert sorted(tensors) == ["embed.weight", "norm.weight"]
        assert {array.dtype.name for array in tensors.values()} == {"float32"}
        wanted = [[scale * n for n in row] for row in ([0, 1], [2, 3], [4, 5])]
        assert tensors["embed.weight"].tolist() == wanted
        assert tensors["norm.weight"].tolist() == [scale, scale]


@pytest.mark.parametrize(
    ("folder", "schema"),
    [
        (PROMPTS, schemas.PROMPTS),
        (ROLLOUT, schemas.ROLLOUTS),
        (SCORES, schemas.scores_schema(["exact"])),
    ],
)
def test_golden_columns_are_all_in_todays_schema_with_their_types(
    golden: Store, folder: str, schema: pa.Schema
) -> None:
    today = {field.name: field.type for field in schema}
    for field in table_of(golden, folder).schema:
        assert today.get(field.name) == field.type
