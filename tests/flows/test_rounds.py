"""Rounds that fill a batch with groups whose rewards differ: which rows, which samples, resumed.

Rewards here depend on the prompt and the place in the group alone, so what has to come out is
known whatever the model samples: prompts in TELLING have a spread, the others have none.
"""

import json
import shutil

import pyarrow as pa
import pytest

from artifacts.branches import open_store
from artifacts.collection import collect, plan_collection
from artifacts.errors import IntegrityError
from artifacts.keep_rules import parse_rule
from artifacts.listing import walk
from artifacts.manifests import FILE_NAME, Manifest, read_manifest, write_manifest
from artifacts.retention import read_catalog, versions_within_reach
from artifacts.runs import committed
from artifacts.shards import read_shard, read_table, write_shard
from artifacts.tombstones import is_retired
from artifacts.verification import verify
from flows.branch import branch
from flows.export import export_policy
from flows.iteration import read_iteration
from flows.launch import run_stage
from flows.publication import metrics_of
from flows.record import config_of
from flows.replay import replay
from flows.report import Report
from flows.samples import join_iteration
from flows.status import run_status, status_table
from flows.tracking import Tracker, connect, tracking_uri
from stages.contract import StageError
from tiny_run import digests, session, stages, train

TELLING = (2, 3, 5, 6, 9)
REWARDS = f"""
from pathlib import Path


def telling(sample_id, n, **row):
    return float(sample_id[-3:]) if n in {TELLING} else 1.0


def flat(**row):
    return 0.25


def gappy(sample_id, n, **row):
    if n == 2 and sample_id.endswith("000"):
        return None
    return telling(sample_id, n)


def fragile(sample_id, n, **row):
    if n == 3 and Path("broken").exists():
        raise RuntimeError("the checker is down")
    return telling(sample_id, n)
"""
ROUNDS = (
    "data.path=ten.jsonl",
    "data.batch_size=2",
    "data.shuffle=false",
    "rollout.max_rounds=3",
    "rollout.prompts_per_shard=1",
    "score.rewards=[{fn: 'graded.py:telling'}]",
    "update.zero_spread=drop",
    "update.minibatches=1",
)
# By hand: (epoch, row) of each round, until two prompts of TELLING are found or three rounds over.
DRAWN = {
    1: [[(0, 0), (0, 1)], [(0, 2), (0, 3)]],
    2: [[(0, 4), (0, 5)], [(0, 6)]],
    3: [[(0, 7), (0, 8)], [(0, 9), (1, 0)], [(1, 1)]],
    4: [[(1, 2), (1, 3)]],
}
TRAINED = {1: [2, 3], 2: [5, 6], 3: [9], 4: [2, 3]}


@pytest.fixture(scope="module", autouse=True)
def inputs(folder):
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "n": n} for n in range(10)]
    (folder / "ten.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "graded.py").write_text(REWARDS)


@pytest.fixture(scope="module")
def whole(folder, inputs):
    """The run that nobody disturbs."""
    with session("run=rounds", *ROUNDS) as made:
        train(made)
    return f"{folder}/runs/rounds"


def drawn(store, iteration):
    """(epoch, row) of each group of each round of a committed iteration."""
    return [
        list(dict.fromkeys(zip(*(table[n].to_pylist() for n in ("epoch", "row")), strict=True)))
        for table in (
            read_table(store, made.rollout.folder, made.rollout.manifest)
            for made in read_iteration(store, iteration).rounds
        )
    ]


def table_of(url, iteration):
    store = open_store(url)
    return join_iteration(store, read_iteration(store, iteration))


def metrics(url, iteration):
    ((_, manifest),) = committed(open_store(url), iteration, "update")
    return manifest.metrics


def test_rounds_draw_on_until_the_batch_is_full_and_no_row_is_lost_or_repeated(whole):
    store = open_store(whole)
    assert {i: drawn(store, i) for i in DRAWN} == DRAWN
    rows = [row for i in DRAWN for part in drawn(store, i) for row in part]
    assert rows == [(position // 10, position % 10) for position in range(len(rows))]


def test_update_trains_on_the_first_groups_with_spread_and_counts_the_others(whole):
    for iteration, trained in TRAINED.items():
        rows = table_of(whole, iteration).to_pylist()
        assert sorted({r["row"] for r in rows if r["weight"] == 1}) == trained
        for row in rows:
            is_trained = row["row"] in trained
            assert row["weight"] == float(is_trained)
            assert (row["step"] is not None) == is_trained
            assert (row["advantage"] is not None) == is_trained
    counts = ("rounds", "drawn_groups", "zero_spread_groups", "surplus_groups", "short_groups")
    found = {i: tuple(metrics(whole, i)[f"update/{n}"] for n in counts) for i in DRAWN}
    assert found == {1: (2, 4, 2, 0, 0), 2: (2, 3, 1, 0, 0), 3: (3, 5, 4, 0, 1), 4: (1, 2, 0, 0, 0)}
    assert [metrics(whole, i)["update/trained_samples"] for i in DRAWN] == [4, 4, 2, 4]


def test_sample_ids_and_seeds_of_all_rounds_differ(whole):
    rows = [row for i in DRAWN for row in table_of(whole, i).to_pylist()]
    assert len({row["sample_id"] for row in rows}) == len(rows) == 42
    assert len({row["seed"] for row in rows}) == len(rows)
    ids = [row["group_id"] for row in table_of(whole, 3).to_pylist()]
    assert sorted(set(ids)) == [f"000003-{group:05d}" for group in range(5)]


def test_run_of_which_each_stage_is_made_by_a_fresh_session_gives_the_same_bytes(whole, folder):
    count = 0
    while True:
        with session("run=hopping", *ROUNDS) as made:
            made.recall_finished()
            fresh = next((one for one in stages(made) if not one.was_reused), None)
            if fresh is None:
                break
            count += 1
    assert count == 2 * sum(len(rounds) for rounds in DRAWN.values()) + len(DRAWN)
    assert digests(f"{folder}/runs/hopping") == digests(whole)


def test_round_cut_off_between_shards_goes_on_to_the_same_bytes(whole, folder):
    with session("run=cut", *ROUNDS, "iterations=1") as made:
        train(made)
    store = open_store(f"{folder}/runs/cut")
    second = read_iteration(store, 1).rounds[1]
    for output in (second.rollout, second.scores, read_iteration(store, 1).update):
        store.remove(f"{output.folder}/{FILE_NAME}")
    store.remove(f"{second.rollout.folder}/{second.rollout.manifest.shards[1].name}")
    with session("run=cut", *ROUNDS, "iterations=1") as made:
        assert made.recall_finished() == 0
        assert len(made.iterations[1].rounds) == 1
        train(made)
        assert made.iterations[1].rounds[1].rollout.manifest.provenance["found"] == 1
    ours, theirs = digests(f"{folder}/runs/cut"), digests(whole)
    assert ours == {place: found for place, found in theirs.items() if place[0] == 1}


def test_oversampled_round_draws_as_many_times_what_is_missing(folder):
    overrides = ("run=over", *ROUNDS, "rollout.oversample=1.5", "iterations=2")
    with session(*overrides) as made:
        train(made)
    store = open_store(f"{folder}/runs/over")
    # 3 for 2; row 2 is one of them, and 2 for the other one, of which row 3 is the first.
    assert drawn(store, 1) == [[(0, 0), (0, 1), (0, 2)], [(0, 3), (0, 4)]]
    assert drawn(store, 2) == [[(0, 5), (0, 6), (0, 7)]]


def test_surplus_groups_are_counted_and_not_trained_on(folder):
    overrides = ("run=surplus", *ROUNDS, "data.batch_size=1", "rollout.max_rounds=1")
    with session(*overrides, "rollout.oversample=4", "iterations=1") as made:
        train(made)
    url = f"{folder}/runs/surplus"
    assert drawn(open_store(url), 1) == [[(0, 0), (0, 1), (0, 2), (0, 3)]]
    rows = table_of(url, 1).to_pylist()
    assert {row["row"] for row in rows if row["weight"] == 1} == {2}
    assert metrics(url, 1)["update/surplus_groups"] == 1
    assert metrics(url, 1)["update/short_groups"] == 0


def test_groups_are_shared_out_evenly_over_steps_whatever_stands_between_them(folder):
    overrides = ("run=steps", *ROUNDS, "update.minibatches=2", "iterations=1")
    with session(*overrides) as made:
        train(made)
    rows = table_of(f"{folder}/runs/steps", 1).to_pylist()
    assert {(row["row"], row["step"]) for row in rows} == {(0, None), (1, None), (2, 1), (3, 2)}


def test_batch_that_stays_short_trains_on_what_there_is_and_skips_empty_steps(folder):
    overrides = ("run=short", *ROUNDS, "rollout.max_rounds=1", "rollout.oversample=1.5")
    with session(*overrides, "update.minibatches=2", "iterations=1") as made:
        train(made)
    url = f"{folder}/runs/short"
    assert metrics(url, 1)["update/short_groups"] == 1
    assert metrics(url, 1)["update/skipped_steps"] == 1
    # One group, whose middle reward is its mean and has nothing to teach.
    assert metrics(url, 1)["update/trained_samples"] == 2


def test_iterations_without_any_spread_leave_the_weights_and_say_so(folder):
    flat = (*ROUNDS, "score.rewards=[{fn: 'graded.py:flat'}]", "rollout.max_rounds=2")
    with session("run=flat", *flat, "iterations=2") as made:
        train(made)
    url = f"{folder}/runs/flat"
    store = open_store(url)
    assert [drawn(store, i) for i in (1, 2)] == [
        [[(0, 0), (0, 1)], [(0, 2), (0, 3)]],
        [[(0, 4), (0, 5)], [(0, 6), (0, 7)]],
    ]
    first, second = (committed(store, i, "update")[0][1] for i in (1, 2))
    assert first.outcome["weights_digest"] == second.outcome["weights_digest"]
    for manifest in (first, second):
        assert manifest.metrics["update/skipped_steps"] == 1
        assert manifest.metrics["update/short_groups"] == 2
        assert manifest.metrics["update/trained_samples"] == 0
    assert verify(store).problems == []


@pytest.mark.parametrize(("on_null", "rounds"), [("drop_sample", 2), ("drop_group", 3)])
def test_null_reward_counts_against_its_group_as_the_policy_says(folder, on_null, rounds):
    gappy = (*ROUNDS, "score.rewards=[{fn: 'graded.py:gappy'}]", f"score.on_null={on_null}")
    with session(f"run={on_null}", *gappy, "iterations=1") as made:
        train(made)
    url = f"{folder}/runs/{on_null}"
    # Row 2 has a null: of a dropped group there is one too few, and row 4 teaches nothing.
    assert len(drawn(open_store(url), 1)) == rounds
    assert metrics(url, 1)["update/short_groups"] == rounds - 2


def test_stages_run_one_by_one_go_through_the_rounds(whole, folder, capsys):
    with session("run=alone", *ROUNDS):
        pass
    config = config_of(f"{folder}/runs/alone", [])
    with pytest.raises(StageError, match="iteration 1 has no committed rollout"):
        run_stage(config, "score", 1, debug=True)
    for name in ("rollout", "rollout", "score"):
        run_stage(config, name, 1, debug=True)
    with pytest.raises(StageError, match=r"iteration 1\.2 has no committed rollout"):
        run_stage(config, "update", 1, debug=True)
    for name in ("rollout", "score", "score", "update"):
        run_stage(config, name, 1, debug=True)
    states = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert states == [
        "rollout 1: completed",
        "rollout 1: reused",
        "score 1: completed",
        "rollout 1: completed",
        "score 1: completed",
        "score 1: reused",
        "update 1: completed",
    ]
    ours = digests(f"{folder}/runs/alone")
    assert ours == {place: found for place, found in digests(whole).items() if place[0] == 1}


def test_round_whose_errors_are_tried_again_decides_anew_what_follows_it(folder):
    fragile = (
        *(*ROUNDS, "run=fragile", "iterations=2"),
        *("score.rewards=[{fn: 'graded.py:fragile'}]", "score.max_error_share=1"),
    )
    (folder / "broken").touch()
    with session(*fragile) as made:
        for number in made.rounds(1):
            made.rollout(1, number)
            made.score(1, number)
    store = open_store(f"{folder}/runs/fragile")
    # Row 3 is null, so that row 4 was drawn in its place.
    assert drawn(store, 1) == [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(0, 4)]]
    (folder / "broken").unlink()
    run_stage(config_of(store.url, []), "score", 1, debug=True, retry_errors=True)
    with session(*fragile) as made:
        train(made)
    assert {i: drawn(store, i) for i in (1, 2)} == {i: DRAWN[i] for i in (1, 2)}
    assert metrics(store.url, 1)["update/short_groups"] == 0
    with session(*fragile) as made:
        assert made.recall_finished() == 2
    with pytest.raises(StageError, match="has been trained on as it was scored"):
        run_stage(config_of(store.url, []), "score", 1, debug=True, retry_errors=True)


def test_run_by_rounds_is_verified_replayed_branched_and_exported(whole, folder):
    assert verify(open_store(whole)).problems == []
    assert replay(whole, 3, debug=True).differences == []
    branch(whole, 3, "rounds-child", [])
    with session("run=rounds-child", *ROUNDS) as made:
        assert made.recall_finished() == 3
        train(made)
    assert digests(f"{folder}/runs/rounds-child") == digests(whole)
    export_policy(config_of(whole, []), str(folder / "exported"), 3, debug=True)
    assert (folder / "exported" / "model.safetensors").exists()


def test_gc_keeps_every_round_that_a_kept_policy_is_rebuilt_from(whole, folder):
    with session("run=thinned", *ROUNDS) as made:
        train(made, until=3)
    store = open_store(f"{folder}/runs/thinned")
    # Policy 3: from the snapshot after 2, and the three rounds of iteration 3.
    collect(store, plan_collection(store, [parse_rule("last=1")]))
    kept = [out for i in (1, 2, 3) for out in read_iteration(store, i).outputs().values()]
    retired = [output.folder for output in kept if is_retired(store, output.folder)]
    assert len(kept) == 5 + 5 + 7
    assert all(folder.startswith(("iteration-000001", "iteration-000002")) for folder in retired)
    assert len(retired) == 10
    with session("run=thinned", *ROUNDS) as made:
        assert made.recall_finished() == 3
        train(made)
    assert digests(store.url) == digests(whole)
    values = versions_within_reach(read_catalog(open_store(whole), walk(open_store(whole))))
    assert values[3]["rollout/samples"] == 15


def test_verify_names_an_update_whose_rounds_are_in_another_order(whole, folder):
    shutil.copytree(whole, folder / "runs" / "turned")
    store = open_store(f"{folder}/runs/turned")
    ((path, manifest),) = committed(store, 2, "update")
    inputs = dict(manifest.inputs)
    for name in ("rollout", "scores"):
        inputs[name], inputs[f"{name}.2"] = inputs[f"{name}.2"], inputs[name]
    store.remove(f"{path}/{FILE_NAME}")
    write_manifest(store, path, Manifest(**{**vars(manifest), "inputs": inputs}))
    problems = [problem for problem in verify(store).problems if problem.startswith(path)]
    assert problems == [f"{path}: its samples are not those of its rollout, in order"]


def test_status_adds_up_rounds_in_a_line_and_lists_them_as_json(whole, capsys):
    found = run_status(whole)
    places = [(r["iteration"], r["stage"], r["round"]) for r in found["stages"]]
    assert places[:5] == [(1, s, n) for n in (1, 2) for s in ("rollout", "score")] + [
        (1, "update", 1)
    ]
    assert len(places) == len(set(places)) == 20
    status_table(found)
    head, *lines = capsys.readouterr().out.splitlines()
    columns = ["iteration", "rounds", "reward", "samples", "trained", "tokens"]
    assert head.split()[: len(columns)] == columns
    # Rewards are 0, 1 and 2 in groups with spread, where 1 teaches nothing, and 1 in others.
    assert [line.split()[:5] for line in lines[:3]] == [
        ["1", "2", "1.000", "12", "4"],
        ["2", "2", "1.000", "9", "4"],
        ["3", "3", "1.000", "15", "2"],
    ]


@pytest.mark.parametrize(
    ("done", "stage", "number", "of"),
    [(1, "score", 1, 2), (2, "rollout", 2, 2), (3, "score", 2, 2), (4, "update", 1, None)],
)
def test_status_of_a_run_killed_in_a_round_says_which(whole, folder, done, stage, number, of):
    name = f"killed-{done}"
    with session(f"run={name}", *ROUNDS) as made:
        work = stages(made)
        for _ in range(done + 1):
            last = next(work)
    store = open_store(f"{folder}/runs/{name}")
    store.remove(f"{last.folder}/{FILE_NAME}")
    row = run_status(store.url)["stages"][-1]
    assert (row["stage"], row["round"], row["state"]) == (stage, number, "partial")
    assert row["of"] == of
    table = join_iteration(store, read_iteration(store, 1))
    assert table.num_rows == {1: 6, 2: 6, 3: 12, 4: 12}[done]
    scored = 6 if done in (2, 3) else 12 if done == 4 else None
    if scored is not None:
        assert table["reward"].null_count == table.num_rows - scored


def test_tasks_are_named_by_iteration_and_from_the_second_on_by_round():
    from flows.train import rollout, score

    assert rollout.task_run_name(parameters={"iteration": 3, "number": 1}) == "rollout-3"
    assert score.task_run_name(parameters={"iteration": 3, "number": 2}) == "score-3.2"


def test_metrics_of_an_iteration_are_those_of_its_rounds_together(whole):
    store = open_store(whole)
    made = read_iteration(store, 3)
    found, table = metrics_of(made.by_stage()), table_of(whole, 3)
    rewards = table["reward"].to_numpy()
    lengths = [len(ids) for ids in table["response_ids"].to_pylist()]
    logprobs = [x for row in table["logprobs"].to_pylist() for x in row]
    assert found["rollout/samples"] == len(rewards) == 15
    assert found["rollout/response_tokens"] == sum(lengths)
    assert found["rollout/response_length_max"] == max(lengths)
    assert found["rollout/response_length_mean"] == pytest.approx(sum(lengths) / 15)
    assert found["rollout/sampled_logprob_mean"] == pytest.approx(sum(logprobs) / sum(lengths))
    assert found["reward/mean"] == pytest.approx(rewards.mean())
    assert found["reward/std"] == pytest.approx(rewards.std())
    assert (found["reward/min"], found["reward/max"]) == (0, 2)
    assert found["score/zero_spread_share"] == pytest.approx(4 / 5)
    seconds = [each.rollout.manifest.provenance["seconds"] for each in made.rounds]
    assert found["seconds/rollout"] == pytest.approx(sum(seconds))


def test_tracking_keeps_every_rounds_manifests_and_a_table_of_all_samples(whole, folder):
    with session("run=rounds", *ROUNDS, "tracking.enabled=true") as made:
        made.recall_finished()
        tracker = Tracker(made.store, made.plan, Report())
        tracker.open("a-flow-run")
        tracker.publish(3, made.iterations[3])
        tracker.close("FINISHED")
        assert tracker.num_failures == 0
        uri = tracking_uri(made.plan)
    client = connect(uri)
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.data.metrics["update/short_groups"] == 1
    assert run.data.metrics["rollout/samples"] == 15
    import mlflow

    def read(path):
        return json.loads(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/{path}"))

    kept = read("manifests/iteration-000003.json")
    assert list(kept) == [
        *("rollout", "score", "rollout.2", "score.2", "rollout.3", "score.3", "update"),
    ]
    assert kept["update"]["inputs"]["scores.3"]["digest"] == kept["score.3"]["digest"]
    assert len(read("samples/iteration-000003.json")["data"]) == 15


def forge_policy(store, folder, digest):
    """Put rows of another policy in a committed rollout, all its digests right."""
    manifest = read_manifest(store, folder)
    shards = []
    for index, shard in enumerate(manifest.shards):
        table = read_shard(store, folder, shard)
        place = table.column_names.index("policy_digest")
        table = table.set_column(place, "policy_digest", pa.array([digest] * table.num_rows))
        shards.append(write_shard(store, folder, index, table))
    store.remove(f"{folder}/{FILE_NAME}")
    write_manifest(store, folder, Manifest(**{**vars(manifest), "shards": tuple(shards)}))


def test_update_refuses_samples_that_another_policy_drew(folder):
    with session("run=stale", *ROUNDS) as made:
        train(made, until=1)
        rollout = made.rollout(2)
        base = made.plan.model_digest
        forge_policy(made.store, rollout.folder, base)
    with session("run=stale", *ROUNDS) as made:
        assert made.recall_finished() == 1
        updated = made.history[0].manifest.outcome["weights_digest"]
        made.recall(2)
        with pytest.raises(IntegrityError, match="policy digest of its samples") as refused:
            train(made)
    assert updated in str(refused.value)
    assert base in str(refused.value)
    assert rollout.folder in str(refused.value)
