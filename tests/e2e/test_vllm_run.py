"""A whole run with vLLM, undisturbed but evaluated, and killed inside a rollout: the same bytes."""

import pytest

from artifacts.runs import committed
from artifacts.store import Store
from flows.evaluations import evaluation_samples
from launching import EVALUATE, kill_inside, resume_and_compare

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def whole(vllm_bench):
    vllm_bench.cli("train", "run.yaml", EVALUATE)
    return vllm_bench.url("whole")


def test_vllm_samples_with_the_weights_that_the_trainer_has(whole):
    for iteration in (1, 2, 3):
        ((_, update),) = committed(Store(str(whole)), iteration, "update")
        assert update.metrics["mismatch/logprob_abs_max"] < 1e-4


def test_evaluation_with_vllm_answers_greedily_and_by_sampling_with_each_policy(whole):
    store = Store(str(whole))
    for version in (0, 2, 3):
        rows = evaluation_samples(store, version).to_pylist()
        assert {row["policy_version"] for row in rows} == {version}
        assert len([r for r in rows if r["answers"] == "sampled"]) == 2
        for row in (r for r in rows if r["answers"] == "greedy"):
            assert 0 < row["tokens"] <= 8
            assert set(row["logprobs"]) == {0.0}  # one token to choose from


def test_run_killed_inside_a_vllm_rollout_resumes_to_the_same_bytes(vllm_bench, whole):
    killed = kill_inside(vllm_bench, "rollout")
    resume_and_compare(vllm_bench, killed, whole)
    ((_, manifest),) = committed(Store(str(vllm_bench.url(killed.run))), 2, "rollout")
    assert manifest.provenance["found"] == killed.kept["rollout"] > 0
    assert manifest.provenance["made"] + killed.kept["rollout"] == len(manifest.shards) == 4
