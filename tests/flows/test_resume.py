"""What a resumed run goes on with: rows, schedule, weights, as if it had never stopped."""

import pyarrow as pa
import pytest

from artifacts.branches import open_store
from artifacts.runs import committed
from artifacts.shards import read_shard, read_table
from tiny_run import digests, session, train


def rows_of(url, iteration):
    """(source, epoch, row) of the groups of an iteration, in order."""
    store = open_store(url)
    ((folder, manifest),) = committed(store, iteration, "rollout")
    table = read_table(store, folder, manifest)
    seen = zip(*(table[n].to_pylist() for n in ("source", "epoch", "row")), strict=True)
    return list(dict.fromkeys(seen))


def steps_of(url, name):
    """The value of a metric at every optimizer step of the run."""
    store, values = open_store(url), {}
    for iteration in range(1, 20):
        for folder, manifest in committed(store, iteration, "update"):
            (shard,) = (s for s in manifest.shards if s.name.startswith("steps."))
            table: pa.Table = read_shard(store, folder, shard)
            values |= {r["step"]: r["value"] for r in table.to_pylist() if r["name"] == name}
    return [values[step] for step in sorted(values)]


def halved(run, at, *overrides):
    """A run whose session ends after iteration ``at``, and goes on in another."""
    with session(f"run={run}", *overrides) as first:
        train(first, until=at)
    with session(f"run={run}", *overrides) as second:
        assert second.recall_finished() == at
        train(second)


# Six prompts, two an iteration, six iterations: two epochs.
EPOCHS = ("data.batch_size=2", "iterations=6", "update.minibatches=1")


@pytest.mark.parametrize("at", [2, 3, 5])
def test_resume_in_and_at_the_end_of_an_epoch_uses_every_row_once_an_epoch(folder, at):
    with session(f"run=whole-{at}", *EPOCHS) as made:
        train(made)
    halved(f"halves-{at}", at, *EPOCHS)
    whole, halves = (f"{folder}/runs/{name}-{at}" for name in ("whole", "halves"))
    rows = [rows_of(halves, iteration) for iteration in range(1, 7)]
    assert rows == [rows_of(whole, iteration) for iteration in range(1, 7)]
    for epoch in (0, 1):
        drawn = [row for iteration in rows for _, e, row in iteration if e == epoch]
        assert sorted(drawn) == list(range(6))
    assert digests(halves) == digests(whole)


def test_resume_of_a_complete_run_has_nothing_left(folder):
    with session("run=whole-done", *EPOCHS) as made:
        train(made)
    with session("run=whole-done", *EPOCHS) as again:
        assert again.recall_finished() == 6
        train(again)
        assert "cluster" not in vars(again.pools)  # no worker was started


SCHEDULED = ("iterations=5", "update.lr=1e-3", "checkpoint.every=5")  # two steps an iteration


@pytest.mark.parametrize(("schedule", "expected"), [("linear", 6.0e-4), ("cosine", 6.545085e-4)])
def test_resume_goes_on_with_the_learning_rate_of_the_step_it_is_at(folder, schedule, expected):
    overrides = (*SCHEDULED, f"update.lr_schedule={schedule}")
    with session(f"run={schedule}-whole", *overrides) as made:
        train(made)
    # Twice in a row, and once without training anything in between.
    for until in (2, 2, 4, 5):
        with session(f"run={schedule}", *overrides) as made:
            made.recall_finished()
            train(made, until=until)
    url = f"{folder}/runs/{schedule}"
    rates = steps_of(url, "update/lr")
    assert rates[4] == pytest.approx(expected, rel=1e-6)  # after four finished updates
    for name in ("update/lr", "update/loss", "update/grad_norm", "mismatch/k3"):
        assert steps_of(url, name) == steps_of(f"{url}-whole", name)
    assert digests(url) == digests(f"{url}-whole")


def test_resume_from_an_old_snapshot_replays_updates_and_makes_no_sample_again(folder):
    overrides = ("iterations=6", "checkpoint.every=3")
    with session("run=log-whole", *overrides) as made:
        train(made)
    with session("run=log", *overrides) as made:
        train(made, until=5)
    store = open_store(f"{folder}/runs/log")
    assert store.names("policy") == ["000003"]
    before = {name: store.names(f"iteration-{name:06d}/rollout") for name in range(1, 6)}
    with session("run=log", *overrides) as made:
        assert made.recall_finished() == 5
        train(made)
        assert made.pools.trainers.layout["ranks"] == 1
    assert {n: store.names(f"iteration-{n:06d}/rollout") for n in range(1, 6)} == before
    ((_, update),) = committed(store, 6, "update")
    ((_, rollout),) = committed(store, 6, "rollout")
    assert digests(f"{folder}/runs/log") == digests(f"{folder}/runs/log-whole")
    # The engine sampled with the policy that was replayed, and the trainer agrees with it.
    assert rollout.inputs["policy"] == update.inputs["policy"]
    assert update.metrics["mismatch/logprob_abs_max"] < 1e-4


def test_run_over_mixed_sources_resumes_to_the_same_rows(folder):
    (folder / "letters.jsonl").write_text(
        "".join(f'{{"question": "{c}=", "truth": "{c}"}}\n' for c in "abcde")
    )
    sources = (
        "data={sources: [{path: data.jsonl, weight: 2, name: sums}, "
        "{path: letters.jsonl, prompt: question, answer: truth}], "
        "batch_size: 3, template: plain}"
    )
    overrides = (sources, "iterations=8", "update.minibatches=1")
    with session("run=mixed-whole", *overrides) as made:
        train(made)
    halved("mixed", 3, *overrides)
    url = f"{folder}/runs/mixed"
    rows = [row for iteration in range(1, 9) for row in rows_of(url, iteration)]
    assert rows == [r for i in range(1, 9) for r in rows_of(f"{url}-whole", i)]
    assert {source for source, _, _ in rows} == {"sums", "data-2"}
    assert len(set(rows)) == len(rows) == 24
    assert digests(url) == digests(f"{url}-whole")
