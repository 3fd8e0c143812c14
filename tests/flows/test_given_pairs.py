"""A run on pairs that the data holds: what its shards say, that it learns, and what it refuses."""

import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from artifacts.invariants import problems_of
from artifacts.manifests import Ref, read_manifest
from artifacts.shards import read_shard
from artifacts.verification import committed_folders, verify
from flows.config import UserError, load_config
from flows.evaluations import evaluation_samples
from flows.plan import make_plan
from flows.replay import replay
from flows.samples import join_iteration
from stages.update.export import save_policy
from tiny_run import digests, session, train, write_inputs

COLUMNS = {"prompt": "question", "chosen": "good", "rejected": "bad"}
PAIRS = [{"question": f"{n}+{n}=", "good": f"{2 * n}", "bad": f"{2 * n}?"} for n in range(8)]
CHANGES = {
    "data": {
        "sources": [{"path": "pairs.jsonl", **COLUMNS}, {"path": "more.parquet", **COLUMNS}],
        "template": "plain",
        "batch_size": 4,
    },
    "rollout": {"engine": "hf", "dtype": "float32", "max_new_tokens": 6, "prompts_per_shard": 2},
    "score": {},
    "update": {"algorithm": "dpo", "lr": 1e-3, "dtype": "float32", "minibatches": 2},
    "iterations": 6,
}

EVALUATE = {
    "data": {"path": "data.jsonl"},
    "samples_per_prompt": 3,
    "rewards": [{"fn": "rewards.py:digits"}],
}


def write_pairs(folder):
    write_inputs(folder, **CHANGES)
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in PAIRS[:5]))
    pq.write_table(pa.Table.from_pylist(PAIRS[5:]), folder / "more.parquet")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run; yields its folder, store, what each iteration made, and its pools' names."""
    folder = tmp_path_factory.mktemp("pairs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_pairs(folder)
        with session() as made:
            train(made)
            yield folder, made.store, made.iterations, set(vars(made.pools))


def samples(run, iteration):
    """The iteration's samples with scores and advantages, as rows."""
    _, store, iterations, _ = run
    return join_iteration(store, iterations[iteration]).to_pylist()


def metrics(run, name):
    """A metric of the update in each iteration, in order."""
    return [made.update.manifest.metrics.get(name) for _, made in sorted(run[2].items())]


def test_given_samples_are_the_files_and_have_nothing_of_a_sampler(run):
    rows = {row["question"]: row for row in PAIRS}
    tokenizer = tiny.tokenizer()
    for sample in samples(run, 1):
        row = rows[sample["prompt_text"]]
        text = row["good"] if sample["sample_index"] == 0 else row["bad"]
        whole = tokenizer(f"{row['question']}{text}<eos>")["input_ids"]
        assert sample["prompt_ids"] + sample["response_ids"] == whole
        assert (sample["text"], sample["finish_reason"]) == (text, "given")
        assert sample["loss_mask"] == [1] * len(sample["response_ids"])
        unknown = ("logprobs", "seed", "policy_version", "policy_digest")
        assert [sample[name] for name in unknown] == [None] * 4


def test_given_samples_score_one_for_the_chosen_and_zero_for_the_rejected(run):
    for sample in samples(run, 2):
        verdict = float(sample["sample_index"] == 0)
        assert (sample["reward"], sample["reward.preference"]) == (verdict, verdict)
        assert len(sample["reference_logprobs"]) == len(sample["response_ids"])


def test_no_engine_is_made(run):
    assert "engines" not in run[3]
    assert "trainers" in run[3]


def test_every_source_is_gone_through_once_an_epoch(run):
    drawn = Counter(
        (sample["source"], sample["epoch"], sample["row"])
        for iteration in range(1, 7)
        for sample in samples(run, iteration)
        if sample["sample_index"] == 0
    )
    assert set(drawn.values()) == {1}
    assert sum(drawn.values()) == 24
    assert {source for source, _, _ in drawn} == {"data-1", "data-2"}
    assert {row for source, epoch, row in drawn if (source, epoch) == ("data-1", 0)} == set(
        range(5)
    )


def test_margin_rises_until_every_pair_is_in_order(run):
    margins = metrics(run, "update/preference_margin")
    assert margins[0] < margins[2] < margins[-1]
    assert metrics(run, "update/preference_accuracy")[-1] == 1


def test_margin_of_a_step_is_what_plain_transformers_give(run):
    folder, store, iterations, _ = run
    (snapshot,) = (f for f in committed_folders(store) if f.startswith("policy/000004"))
    policy = folder / "policy"
    ref = Ref(snapshot, read_manifest(store, snapshot).digest)
    save_policy(store, ref, str(folder / "model"), str(policy))
    first = [sample for sample in samples(run, 5) if sample["step"] == 9]
    signs = [1 if sample["sample_index"] == 0 else -1 for sample in first]
    moved = [logprob(policy, s) - logprob(folder / "model", s) for s in first]
    margin = 0.1 * sum(sign * by for sign, by in zip(signs, moved, strict=True)) / 2
    (steps,) = (s for s in iterations[5].update.manifest.shards if s.name.startswith("steps."))
    rows = read_shard(store, iterations[5].update.folder, steps).to_pylist()
    (found,) = (
        r["value"] for r in rows if (r["step"], r["name"]) == (9, "update/preference_margin")
    )
    assert margin > 0
    assert found == pytest.approx(margin, rel=1e-3)


def logprob(model, sample):
    """Log-prob of a sample's whole response, by one plain forward."""
    ids = sample["prompt_ids"] + sample["response_ids"]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logprobs = network(torch.tensor([ids])).logits[0].log_softmax(-1)
    places = range(len(sample["prompt_ids"]), len(ids))
    return sum(float(logprobs[place - 1, ids[place]]) for place in places)


def test_metrics_of_a_sampler_are_absent(run):
    assert not any(name.startswith("mismatch/") for name in run[2][3].update.manifest.metrics)
    rollout = run[2][3].rounds[0].rollout.manifest
    assert rollout.metrics["rollout/sampled_logprob_mean"] is None
    assert rollout.inputs.keys() == {"prompts"}


def test_verify_finds_nothing_wrong_and_a_replay_is_equal(run, monkeypatch):
    monkeypatch.chdir(run[0])
    assert verify(run[1]).problems == []
    assert replay(run[1].url, 5, debug=True).differences == []


def test_interrupted_run_goes_on_to_the_same_bytes(run, monkeypatch):
    monkeypatch.chdir(run[0])
    with session("run=halves", "iterations=6") as first:
        train(first, until=1)
        first.rollout(2)
    with session("run=halves", "iterations=6") as second:
        second.recall_finished()
        train(second, until=2)
    whole, halves = digests(run[1].url), digests(second.store.url)
    assert len(halves) == 6
    assert halves == {place: digest for place, digest in whole.items() if place[0] <= 2}


def test_policy_that_learned_from_pairs_is_evaluated_by_what_it_answers(run, monkeypatch):
    monkeypatch.chdir(run[0])
    with session("iterations=6", f"evaluate={json.dumps(EVALUATE)}") as made:
        made.recall_finished()
        made.evaluate(6)
    assert verify(run[1]).problems == []
    rows = evaluation_samples(run[1], 6).to_pylist()
    assert len(rows) == 6 * 3
    weights = run[2][6].update.manifest.outcome["weights_digest"]
    assert {row["policy_digest"] for row in rows} == {weights}
    assert "given" not in {row["finish_reason"] for row in rows}


def test_verify_names_given_samples_with_a_samplers_log_probs(run):
    store, made = run[1], run[2][1].rounds[0].rollout
    tables = [read_shard(store, made.folder, shard) for shard in made.manifest.shards]
    column = pa.array([[0.0] * 3] * tables[0].num_rows, tables[0].schema.field("logprobs").type)
    place = tables[0].schema.get_field_index("logprobs")
    tables[0] = tables[0].set_column(place, tables[0].schema.field(place), column)
    found = list(problems_of(store, made.folder, made.manifest, tables))
    assert any("were given, and logprobs is known" in problem for problem in found)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("update.algorithm=grpo", "update.loss clip learns from rewards of samples: take update"),
        ("score.rewards=[{fn: 'rewards.py:digits'}]", "score.rewards has digits, and data.chosen"),
        ("rollout.samples_per_prompt=4", "samples_per_prompt is 4, and a pair of the data is 2"),
        ("rollout.temperature=0.7", "rollout.temperature is 0.7, and data.chosen gives"),
        ("rollout.max_rounds=3", "rollout.max_rounds is 3, and data.chosen gives the responses"),
        ("update.correction=tis", "update.correction is tis, and data.chosen gives"),
        ("update.old_logprobs=sampler", "update.old_logprobs is sampler, and data.chosen"),
        ("update.reward_kl_coef=0.1", "update.reward_kl_coef is 0.1, and data.chosen"),
        ("update.overlong_buffer_tokens=2", "update.overlong_buffer_tokens is 2, and data"),
        ("data.sources=[{path: pairs.jsonl, prompt: question, chosen: good}]", "give both chosen"),
        ("evaluate={data: {path: data.jsonl}}", "name a reward for the answers to held-out"),
        (
            "data.sources=[{path: pairs.jsonl, chosen: good, rejected: bad}]",
            "has no column 'prompt'",
        ),
    ],
)
def test_pairs_with_what_they_cannot_obey_are_refused(run, monkeypatch, override, sentence):
    monkeypatch.chdir(run[0])
    with pytest.raises(UserError) as refused:
        make_plan(load_config("run.yaml", [override]))
    assert sentence in str(refused.value)


def test_plan_of_pairs_says_that_no_engine_is_loaded(run, monkeypatch):
    monkeypatch.chdir(run[0])
    plan = make_plan(load_config("run.yaml"))
    rows = {name: value for name, value, _ in plan.table()}
    assert rows["responses"] == "given, no engine loaded"
    assert plan.config.rollout.samples_per_prompt == 2
