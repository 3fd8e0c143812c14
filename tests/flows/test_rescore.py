"""``ratchet rescore``: another reward over stored samples, and the run that goes on from there."""

import json
from pathlib import Path

import numpy as np
import pytest

from artifacts.branches import open_store
from artifacts.collection import collect, plan_collection
from artifacts.keep_rules import parse_rule
from artifacts.pins import read_pins
from artifacts.runs import committed
from artifacts.shards import read_table
from artifacts.verification import verify
from flows.branch import branch
from flows.cli import main
from flows.config import UserError
from flows.replay import replay
from flows.rescore import range_of, rescore, reward_of
from flows.status import run_status
from tiny_run import digests, session, train

SHORT = "score.rewards=[{fn: 'rewards.py:short'}]"


@pytest.fixture(scope="module")
def whole(folder):
    """The run whose samples are scored again: three iterations."""
    with session("iterations=3") as made:
        train(made)
    return f"{folder}/runs/whole"


@pytest.fixture
def ratchet(monkeypatch, capsys):
    def run(*args: str):
        monkeypatch.setattr("sys.argv", ["ratchet", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def files(run):
    """Bytes of each file of a run but its pins."""
    found = [p for p in Path(run).rglob("*") if p.is_file() and p.parent.name != "pins"]
    return {path: path.read_bytes() for path in found}


def column(run, iteration, stage, name):
    store = open_store(run)
    (found,) = committed(store, iteration, stage)
    return read_table(store, *found)[name]


def test_rescored_run_trains_as_a_branch_that_had_the_reward_all_along(whole, folder, ratchet):
    before = files(whole)
    args = ("rescore", whole, "--reward", "rewards.py:short", "--run", "again", "--debug", "--json")
    code, out, _ = ratchet(*args, "--iterations", "2:3", "--verdict", "0.2")
    assert code == 0
    again = f"{folder}/runs/again"
    for found in json.loads(out)["iterations"]:
        old = column(whole, found["iteration"], "score", "reward").to_numpy()
        lengths = [len(ids) for ids in column(whole, found["iteration"], "rollout", "response_ids")]
        new = np.array([1 / (1 + length) for length in lengths])
        assert column(again, found["iteration"], "score", "reward").to_pylist() == new.tolist()
        assert (found["old_mean"], found["new_mean"]) == pytest.approx((old.mean(), new.mean()))
        pairs = zip(old, new, strict=True)
        assert found["flipped"] == sum((a >= 0.2) != (b >= 0.2) for a, b in pairs)
        products = ((old - old.mean()) * (new - new.mean())).mean()
        if new.std():
            assert found["correlation"] == pytest.approx(products / old.std() / new.std())
        else:
            assert found["correlation"] is None
    assert files(whole) == before
    assert not list(Path(again).glob("iteration-*/rollout"))
    assert ratchet("verify", again)[0] == 0
    shown = json.loads(ratchet("samples", again, "--iteration", "3", "--json", "--limit", "99")[1])
    assert {row["reward"] for row in shown} == {1 / (1 + row["tokens"]) for row in shown}

    branch(whole, 1, "branched", [SHORT])
    for name in ("again", "branched"):
        with session("iterations=3", f"run={name}", SHORT) as made:
            assert made.recall_finished() == 1
            train(made)
    ours, theirs = digests(again), digests(f"{folder}/runs/branched")
    assert ours[2, "rollout"] == digests(whole)[2, "rollout"]
    assert not Path(again, "iteration-000002", "rollout").exists()
    assert ours[2, "update"] == theirs[2, "update"] != digests(whole)[2, "update"]
    # Samples of policy 2 are its own again; the parent's of iteration 3 are beside, and untrained.
    assert set(ours[3, "rollout"]) == {*theirs[3, "rollout"], *digests(whole)[3, "rollout"]}
    assert ours[3, "update"] == theirs[3, "update"]
    assert run_status(again)["is_complete"]


def test_rescored_run_is_verified_replayed_and_kept_from_its_parents_gc(whole, folder):
    url, _ = rescore(whole, ["{fn: 'rewards.py:short', weight: 2}"], "kept", debug=True)
    assert {pin.name: pin.iterations for pin in read_pins(open_store(whole))}[
        "kept-000000-000003"
    ] == (1, 2, 3)
    store = open_store(whole)
    collect(store, plan_collection(store, [parse_rule("last=1")]))
    # Begun anew, it finds what was scored.
    again, found = rescore(whole, ["{fn: 'rewards.py:short', weight: 2}"], "kept", debug=True)
    assert (again, [each.iteration for each in found]) == (url, [1, 2, 3])
    with session("iterations=3", "run=kept", SHORT.replace("}", ", weight: 2}")) as made:
        assert made.recall_finished() == 0
        train(made, until=2)
    assert replay(url, 1, debug=True).differences == []
    child = open_store(url)
    collect(child, plan_collection(child, [parse_rule("last=1")]))
    assert verify(child).problems == []
    with pytest.raises(UserError, match=r"there is a run at .*kept already"):
        rescore(whole, ["rewards.py:digits"], "kept", debug=True)


def test_rescore_whose_reward_fails_ends_with_1_and_says_where(whole, folder, ratchet):
    (folder / "broken.py").write_text("def broken(text, **row):\n    raise KeyError('x')\n")
    args = ("rescore", whole, "--reward", "broken.py:broken", "--run", "failed", "--debug")
    code, _, err = ratchet(*args)
    assert code == 1
    assert "broken on 12" in err


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("math", {"fn": "math"}),
        ("my.py:f", {"fn": "my.py:f"}),
        ("my.py:f=0.5", {"fn": "my.py:f", "weight": 0.5}),
        ("{fn: math, name: m}", {"fn": "math", "name": "m"}),
    ],
)
def test_reward_is_read_as_a_name_a_weight_or_yaml(text, reward):
    assert reward_of(text) == reward


@pytest.mark.parametrize(
    ("text", "expected"), [(None, (1, 4)), ("2:3", (2, 3)), ("2:", (2, 4)), ("3", (3, 3))]
)
def test_range_is_read_with_both_ends(text, expected):
    found = range_of(text, 4)
    assert (found[0], found[-1]) == expected


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--reward", "rewards.py:short=x"], "'x' for a weight"),
        (["--reward", "{fn"], "is no YAML mapping"),
        (["--reward", "rewards.py:nothing"], "has no function 'nothing'"),
        (["--reward", "maths"], "did you mean 'math'?"),
        (["--reward", "math", "--iterations", "2:9"], "2:9 is not within 1:3"),
        (["--reward", "math", "--iterations", "b"], "'b' is not A:B"),
    ],
)
def test_rescore_that_can_not_be_is_refused_in_a_sentence(whole, ratchet, args, sentence):
    code, _, err = ratchet("rescore", whole, "--run", "refused", *args)
    assert code == 2
    assert sentence in err
    assert not Path(whole).with_name("refused").exists()
