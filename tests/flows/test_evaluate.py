"""Evaluation on held-out data: in a run, beside it and without one; and what it leaves alone."""

import json
import shutil
from itertools import combinations
from pathlib import Path

import pyarrow as pa
import pytest

import tiny
from artifacts import schemas
from artifacts.branches import open_store
from artifacts.collection import collect, plan_collection
from artifacts.invariants import problems_of
from artifacts.keep_rules import parse_rule
from artifacts.manifests import Ref, read_manifest
from artifacts.runs import committed, evaluations_of, read_record
from artifacts.shards import read_table
from artifacts.verification import committed_folders, verify
from flows.branch import branch
from flows.cli import main
from flows.config import load_config
from flows.evaluation import Evaluation
from flows.evaluation_config import EvaluateConfig
from flows.evaluations import evaluation_samples
from flows.listener import Silent
from flows.plan import make_plan
from flows.session import Session
from flows.status import run_status, status_table
from tiny_run import session, train

REWARDS = '''
def digits(text, **row):
    """Share of digits."""
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def seldom(text, sample_id, **row):
    """Nothing is known of each group's first sample."""
    if sample_id.endswith("-000"):
        return None
    return float(len(text) % 2)
'''
EVALUATE = {
    "every": 2,
    "data": {"sources": [{"path": "held.jsonl", "name": "held"}, {"path": "more.jsonl"}]},
    "samples_per_prompt": 4,
    "k": [1, 2],
    "greedy": True,
    "max_prompts": 3,
    "max_new_tokens": 4,
    "rewards": [{"fn": "more_rewards.py:seldom"}],
}
ON = f"evaluate={json.dumps(EVALUATE)}"
PAIRS = "evaluate.data={sources: [{path: held.jsonl, chosen: answer, rejected: n}]}"


def follow(made: Session, until: int | None = None) -> None:
    """What the flow does: evaluate, and train on between."""
    for version in range(len(made.history), (until or made.config.iterations) + 1):
        if version > len(made.history):
            train(made, until=version)
        if made.evaluates(version):
            made.evaluate(version)


@pytest.fixture(scope="module")
def evaluated(folder):
    """A run of three iterations with evaluations of policies 0, 2 and 3."""
    (folder / "more_rewards.py").write_text(REWARDS)
    tiny.save_prompts(folder / "held.jsonl", count=5)
    tiny.save_prompts(folder / "more.jsonl", count=2)
    with session("iterations=3", "run=evaluated", ON) as made:
        follow(made)
    return f"{folder}/runs/evaluated"


@pytest.fixture(scope="module")
def plain(folder):
    """The same run without evaluations."""
    with session("iterations=3", "run=plain") as made:
        train(made)
    return f"{folder}/runs/plain"


@pytest.fixture
def ratchet(monkeypatch, capsys):
    def run(*args: str):
        monkeypatch.setattr("sys.argv", ["ratchet", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def newest(url, version):
    ((folder, manifest),) = evaluations_of(open_store(url), version)
    return folder, manifest


def evaluation_bytes(url):
    paths = (p for p in Path(url).glob("evaluation-*/*/*/*.arrow") if "ledger" not in p.name)
    return {p.relative_to(url): p.read_bytes() for p in paths}


def training(url):
    """Digest of every commit of the training, by folder, whose name holds its key."""
    store = open_store(url)
    folders = [f for f in committed_folders(store) if not f.startswith("evaluation-")]
    return {folder: read_manifest(store, folder).digest for folder in folders}


def identity(url):
    return read_record(open_store(url))["identity"]


def test_evaluation_changes_no_key_and_no_byte_of_the_training(evaluated, plain):
    beside = training(evaluated).items() - training(plain).items()
    assert training(plain).items() <= training(evaluated).items()
    assert {folder.partition("/")[0] for folder, _ in beside} == {"prompts"}  # the held-out ones
    assert identity(plain) == identity(evaluated)


def test_evaluation_is_of_the_first_policy_each_kth_and_the_last(evaluated, capsys):
    found = run_status(evaluated)
    assert [row["policy"] for row in found["evaluations"]] == [0, 2, 3]
    assert verify(open_store(evaluated)).problems == []
    status_table(found)
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    for policy in ("0", "2", "3"):
        for source in ("held", "data-2"):
            assert [policy, source, "sampled"] in rows
            assert [policy, source, "greedy"] in rows


def test_evaluation_metrics_are_what_its_samples_come_to(evaluated):
    _, manifest = newest(evaluated, 2)
    table = evaluation_samples(open_store(evaluated), 2)
    rows = table.to_pylist()
    assert {row["policy_version"] for row in rows} == {2}
    assert {row["policy_digest"] for row in rows} == {weights_after(evaluated, 2)}
    for source, prompts in (("held", 3), ("data-2", 2)):
        mine = [r for r in rows if r["source"] == source and r["answers"] == "sampled"]
        groups = sorted({row["group_id"] for row in mine})
        # The file's first rows, once each and in order.
        firsts = [next(r for r in mine if r["group_id"] == group) for group in groups]
        assert [row["row"] for row in firsts] == list(range(prompts))
        by_group = [[r["reward"] for r in mine if r["group_id"] == group] for group in groups]
        assert all(rewards[0] is None and len(rewards) == 4 for rewards in by_group)
        for k in (1, 2):
            draws = [
                [any(reward >= 0.5 for reward in draw) for draw in combinations(rewards[1:], k)]
                for rewards in by_group
            ]
            expected = sum(sum(drawn) / len(drawn) for drawn in draws) / len(draws)
            found = manifest.metrics[f"evaluate/{source}/pass_at_{k}"]
            assert found == pytest.approx(expected)
        known = [reward for rewards in by_group for reward in rewards[1:]]
        mean = manifest.metrics[f"evaluate/{source}/reward_mean"]
        assert mean == pytest.approx(sum(known) / len(known))
        assert manifest.metrics[f"evaluate/{source}/null_samples"] == prompts
        assert manifest.metrics[f"evaluate/{source}/response_length_mean"] == pytest.approx(
            sum(row["tokens"] for row in mine) / len(mine)
        )
        # A greedy answer is a group's first, of which nothing is known here.
        assert manifest.metrics[f"evaluate/{source}/greedy_pass_at_1"] is None
        assert manifest.metrics[f"evaluate/{source}/greedy_pass_at_1_left_out_prompts"] == prompts
    assert max(row["tokens"] for row in rows) <= 4


def weights_after(url, iteration):
    ((_, update),) = committed(open_store(url), iteration, "update")
    return update.outcome["weights_digest"]


@pytest.mark.parametrize("column", ["samples", "known", "right"])
def test_verify_names_an_evaluation_that_counts_otherwise_than_its_scores(evaluated, column):
    store = open_store(evaluated)
    folder, manifest = newest(evaluated, 2)
    rows = read_table(store, folder, manifest).to_pylist()
    rows[1][column] += 1
    table = pa.Table.from_pylist(rows, schema=schemas.EVALUATION)
    (problem,) = problems_of(store, folder, manifest, [table])
    assert f"of group {rows[1]['group_id']} it counts" in problem


def test_greedy_answers_are_the_most_likely_tokens(evaluated):
    rows = evaluation_samples(open_store(evaluated), 0).to_pylist()
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32).eval()
    for row in (row for row in rows if row["answers"] == "greedy"):
        ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
        best = model(ids).logits[0].argmax(-1).tolist()
        first = len(row["prompt_ids"]) - 1
        assert best[first : first + len(row["response_ids"])] == row["response_ids"]
        assert set(row["logprobs"]) == {0.0}


class KilledError(BaseException):
    """Stands for a kill."""


class KilledAtFirstShard(Silent):
    """Ends the process's work as soon as a shard of an evaluation lies in the store."""

    def progress(self, stage, place):
        def hear(shard=None, **_):
            if shard is not None and stage == "evaluate":
                raise KilledError

        return hear


def copy_of(url, run):
    """The same run under another name."""
    made = Path(url).with_name(run)
    shutil.copytree(url, made)
    return str(made)


def test_evaluation_killed_in_the_middle_is_gone_on_with_to_the_same_bytes(evaluated):
    url = copy_of(evaluated, "killed")
    shutil.rmtree(f"{url}/evaluation-000002")
    with session("iterations=3", "run=killed", ON) as made:
        assert not made.is_complete()
        made.recall_finished()
        del made.history[2:]  # of the past: its policy is brought back
        made.report = KilledAtFirstShard()
        with pytest.raises(KilledError):
            made.evaluate(2)
    (left,) = Path(url).glob("evaluation-000002/rollout/*/shard-*")
    with session("iterations=3", "run=killed", ON) as made:
        made.recall_finished()
        del made.history[2:]
        assert not made.evaluate(2).was_reused
        assert made.evaluate(2).was_reused
        assert made.is_complete()
    store = open_store(url)
    assert read_manifest(store, str(left.parent.relative_to(url))).provenance["found"] == 1
    assert newest(url, 2)[1].digest == newest(evaluated, 2)[1].digest
    assert evaluation_bytes(url) == evaluation_bytes(evaluated)


def test_complete_run_is_one_whose_evaluations_are_made(evaluated):
    with session("iterations=3", "run=evaluated", ON) as made:
        assert made.is_complete()
    with session("iterations=3", "run=evaluated", ON.replace('"every": 2', '"every": 1')) as made:
        assert not made.is_complete()


def test_evaluations_stay_whatever_policy_is_let_go(evaluated):
    url = copy_of(evaluated, "collected")
    store = open_store(url)
    collect(store, plan_collection(store, [parse_rule("last=1")]))
    assert verify(store).problems == []
    assert evaluation_samples(store, 2).num_rows == evaluation_samples(store, 3).num_rows > 0
    with session("iterations=3", "run=collected", ON) as made:
        assert made.is_complete()


def test_branch_has_the_evaluations_of_the_policies_that_it_has(evaluated):
    url = branch(evaluated, 2, "branched", ["update.lr=1e-4"])
    assert [row["policy"] for row in run_status(url)["evaluations"]] == [0, 2]


def test_evaluations_before_a_change_of_the_run_are_those_of_then(evaluated):
    copy_of(evaluated, "changed")
    changed = ("iterations=4", "run=changed", "rollout.temperature=0.5", ON)
    with session(*changed, allow_change=True) as made:
        assert made.recall_finished() == 3
        assert all(made.find_evaluation(version) for version in (0, 2))


def found_with(url, **changes):
    """Whether policy 2's evaluation is there under another ``evaluate`` section."""
    values = {**EVALUATE, **changes}
    plan = make_plan(load_config("run.yaml", ["iterations=3", f"evaluate={json.dumps(values)}"]))
    ((folder, update),) = committed(open_store(url), 2, "update")
    evaluation = Evaluation(open_store(url), plan, plan.config.evaluate)
    return evaluation.find(2, Ref(folder, update.digest)) is not None


def test_evaluation_is_another_where_its_numbers_would_be(evaluated, folder):
    shutil.copy(folder / "held.jsonl", folder / "moved.jsonl")
    tiny.save_prompts(folder / "longer.jsonl", count=6)
    first, second = EVALUATE["data"]["sources"]
    same = [{"every": 3}, {"data": {"sources": [{**first, "path": "moved.jsonl"}, second]}}]
    other = [
        {"samples_per_prompt": 3},
        {"greedy": False},
        {"k": [1]},
        {"verdict": 0.4},
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"top_k": 5},
        {"min_p": 0.1},
        {"max_new_tokens": 3},
        {"max_prompts": 2},
        {"rewards": [{"fn": "more_rewards.py:digits"}]},
        {"data": {"sources": [first]}},
        {"data": {"sources": [{**first, "path": "longer.jsonl"}, second]}},
        {"data": {"sources": [{**first, "answer": None}, second]}},
    ]
    assert {name for change in same + other for name in change} == set(EvaluateConfig.model_fields)
    assert [change for change in same if not found_with(evaluated, **change)] == []
    assert [change for change in other if found_with(evaluated, **change)] == []


def test_evaluate_of_a_run_prints_and_keeps_what_was_asked_for(evaluated, ratchet):
    url = copy_of(evaluated, "asked")
    args = ("evaluate", url, "--data", "held.jsonl", "--samples", "3", "--k", "1,3")
    more = ("--reward", "rewards.py:digits", "--iteration", "1", "--debug", "--json")
    code, out, _ = ratchet(*args, *more)
    assert code == 0
    row = json.loads(out)
    assert (row["policy"], row["metrics"]["evaluate/held/samples"]) == (1, 15)
    assert ratchet(*args, *more)[1] == out
    shown = json.loads(ratchet("samples", url, "--evaluation", "1", "--limit", "99", "--json")[1])
    assert len(shown) == 15
    best = [max(r["reward"] for r in shown if r["row"] == n) >= 0.5 for n in range(5)]
    assert row["metrics"]["evaluate/held/pass_at_3"] == sum(best) / 5


def test_evaluate_of_a_model_makes_a_run_that_is_never_trained(evaluated, ratchet):
    args = ("evaluate", "model", "--data", "held.jsonl", "--reward", "rewards.py:digits")
    sizes = ("data.template=plain", "rollout.engine=hf", "rollout.max_new_tokens=4")
    code, out, _ = ratchet(*args, "--greedy", "--to", "runs/alone", "--debug", *sizes)
    assert code == 0
    assert "pass@1" in out
    assert "greedy" in out
    store = open_store(str(Path("runs/alone").absolute()))
    assert verify(store).problems == []
    folder, manifest = newest(store.url, 0)
    assert read_table(store, folder, manifest).num_rows == 5


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["runs/evaluated", "--data", "none.jsonl"], "there is no such file"),
        (["runs/evaluated", "--samples", "2", "--k", "4"], "pass@4 takes 4 samples"),
        (["runs/evaluated", "--k", "a"], "'a' holds no numbers"),
        (["runs/evaluated", "--greedy", "--k", "2"], "pass@2 takes 2 samples"),
        (
            ["runs/evaluated", "--iteration", "9"],
            "finished 3 iterations, and none makes policy 9",
        ),
        (["runs/plain"], "has no held-out data of its own: give --data FILE"),
        (["runs/evaluated", PAIRS], "chosen and rejected name answers that are there"),
        (["runs/evaluated", "evaluate.samples_per_prompt=0", "evaluate.greedy=false"], "set one"),
        (["runs/evaluated", "--to", "runs/x"], "leave out --to"),
        (["runs/evaluated", "evaluate.max_new_tokens=9999"], "leaves no room for a prompt"),
        (["runs/evaluated", "evaluate.data.template=chat"], "has no chat template"),
        (["runs/plain_less", "--data", "held.jsonl"], "no run and no model"),
        (["model", "--reward", "math"], "give --data FILE"),
        (["model", "--data", "held.jsonl"], "nothing says what is right"),
    ],
)
def test_evaluation_that_can_not_be_is_refused(evaluated, plain, ratchet, args, sentence):
    code, _, err = ratchet("evaluate", *args)
    assert (code, sentence in err) == (2, True), err
