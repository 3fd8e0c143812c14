"""``ratchet gc`` on a handmade run: which bytes stay is known by hand, for each rule.

Twelve iterations, a snapshot after each third; the reward is highest at 5, then at 10.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from artifacts.collection import PinsChangedError, collect, plan_collection
from artifacts.errors import IntegrityError, RetiredError
from artifacts.keep_rules import parse_rule
from artifacts.lease import hold
from artifacts.listing import walk
from artifacts.manifests import FILE_NAME, read_manifest
from artifacts.pins import write_pin
from artifacts.runs import committed
from artifacts.shards import read_file, read_table, write_file
from artifacts.store import Store
from artifacts.tombstones import FILE_NAME as TOMBSTONE
from artifacts.tombstones import read_tombstone
from artifacts.verification import verify
from flows.cli import main
from flows.status import run_status, snapshots
from s3_server import BUCKET
from small_run import (
    REWARDS,
    policy_before,
    small_plan,
    small_run,
    write_iteration,
    write_rollout,
    write_scores,
    write_snapshot,
)
from stages.contract import Product, Work, find, find_or_make
from stages.ledger import write_ledger
from stages.update.trainers import is_rebuildable, newest_snapshot, policy_work

LAST, EVERY = 12, 3
STAGES = ("rollout", "score", "update")


def write_run(store: Store) -> None:
    for iteration in range(1, LAST + 1):
        reward = {5: 1.0, 10: 0.9}.get(iteration, 0.5)
        made = write_iteration(store, iteration, [reward] * len(REWARDS))
        if iteration % EVERY == 0:
            write_snapshot(store, made.update)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    store, _ = small_run(small_plan(folder, iterations=LAST), [])
    write_run(store)
    return folder / "small"


@pytest.fixture
def store(written: Path, tmp_path: Path) -> Store:
    """The run, each test's own."""
    shutil.copytree(written, tmp_path / "run")
    return Store(str(tmp_path / "run"))


@pytest.fixture
def ratchet(monkeypatch, capsys):
    """A command: exit code, output, error."""

    def run(*args: str):
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["ratchet", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


def gc(store: Store, *rules: str) -> None:
    collect(store, plan_collection(store, [parse_rule(r) for r in rules or ["all"]]))


def walk_without_lease(store: Store) -> dict[str, int]:
    """What lies there but for leases: each command that may write takes one."""
    return {path: size for path, size in walk(store).items() if not path.startswith("lease/")}


def has_bytes(store: Store, folder: str) -> bool:
    """Whether all of a commit's files are there; half of them is a failure."""
    manifest = read_manifest(store, folder)
    sizes = [store.size(f"{folder}/{shard.name}") for shard in manifest.shards]
    assert len({size is None for size in sizes}) == 1
    return sizes[0] is not None


def whole_iterations(store: Store) -> set[int]:
    """Iterations that have all their bytes; one that has some of them is a failure."""
    kept = set()
    for iteration in range(1, LAST + 1):
        folders = [folder for stage in STAGES for folder, _ in committed(store, iteration, stage)]
        found = {has_bytes(store, folder) for folder in folders}
        assert (len(folders), len(found)) == (3, 1)
        kept |= {iteration} if True in found else set()
    return kept


def updates(store: Store, until: int) -> list:
    """The committed updates as a session remembers them."""
    found = []
    for iteration in range(1, until + 1):
        ((folder, manifest),) = committed(store, iteration, "update")
        work = Work("update", "update", 1, iteration, {}, manifest.inputs)
        assert work.folder == folder
        found.append(find(store, work))
    return found


RULES: dict[str, tuple[list[str], set[int], set[int]]] = {
    "the last, which has a snapshot": (["last=1"], {12}, {12}),
    "the last two: 11 by replay from 9": (["last=2"], {10, 11, 12}, {9, 12}),
    "every fourth: 4 from 3, 8 by 7 from 6": (["every=4"], {4, 7, 8, 12}, {3, 6, 12}),
    "every third, all of them snapshots": (["every=3"], {3, 6, 9, 12}, {3, 6, 9, 12}),
    "an early one, from the base model": (["version=2"], {1, 2, 12}, {12}),
    "the best, 4 and 5 from 3": (["best=reward/mean"], {4, 5, 12}, {3, 12}),
    "the best two, 10 from 9": (["best=reward/mean:2"], {4, 5, 10, 12}, {3, 9, 12}),
    "two rules, either of which keeps": (["last=1", "version=7"], {7, 12}, {6, 12}),
    "all": (["all"], {*range(1, 13)}, {3, 6, 9, 12}),
}


@pytest.mark.parametrize("name", RULES)
def test_gc_under_a_rule_leaves_the_bytes_that_were_worked_out_by_hand(store, name) -> None:
    rules, iterations, policies = RULES[name]
    before = {path for path in walk(store) if path.endswith(FILE_NAME)}
    gc(store, *rules)
    assert whole_iterations(store) == iterations
    assert set(snapshots(store)) == policies
    assert before <= walk(store).keys()
    assert verify(store).problems == []


def test_gc_without_a_rule_keeps_everything(store) -> None:
    before = walk(store)
    gc(store)
    assert walk(store) == before


def test_gc_leaves_what_the_newest_policy_is_rebuilt_from(store) -> None:
    for iteration in (13, 14):
        write_iteration(store, iteration)
    gc(store, "last=1")
    history = updates(store, 14)
    assert newest_snapshot(store, history) == 12
    for update in history[12:]:
        for name in ("rollout", "scores"):
            ref = update.manifest.inputs[name]
            assert read_table(store, ref.path, read_manifest(store, ref.path, ref.digest)).num_rows
    folder = policy_work(history[11]).folder
    assert read_file(store, folder, read_manifest(store, folder).shards[0])


def test_policies_within_reach_are_those_whose_inputs_are_there(store) -> None:
    gc(store, "last=2", "version=5")
    history = updates(store, LAST)
    found = {v for v in range(1, LAST + 1) if is_rebuildable(store, history[:v])}
    # 3, 4, 5 and 9 to 12; 6 had a snapshot and iteration 6 is gone too.
    assert found == {3, 4, 5, 9, 10, 11, 12}
    assert plan_collection(store).kept == sorted(found)


def test_gc_leaves_an_iteration_that_is_not_finished_alone(store) -> None:
    rollout = write_rollout(store, 13, list("abcdefgh"))
    scores = write_scores(store, 13, rollout, [1.0] * 8)
    store.remove(f"{scores.folder}/{FILE_NAME}")
    store.put("iteration-000013/score/0123/shard-00000.arrow", b"another attempt")
    before = {path for path in walk(store) if "000013" in path}
    gc(store, "last=1")
    assert {path for path in walk(store) if "000013" in path} == before


def test_gc_twice_removes_nothing_the_second_time(store) -> None:
    for rules in (["last=2"], ["every=4", "best=reward/mean"], ["last=1"]):
        rules_ = [parse_rule(rule) for rule in rules]
        collect(store, plan_collection(store, rules_))
        before = walk(store)
        again = plan_collection(store, rules_)
        assert list(again.lines()) == []
        collect(store, again)
        assert walk(store) == before


def test_gc_retires_a_commit_that_no_policy_was_made_from(store) -> None:
    work = Work("rollouts", "rollout", 1, 7, {"other": 1}, {"policy": policy_before(store, 7)})
    other = find_or_make(
        store, work, lambda: Product([write_file(store, work.folder, "shard", "arrow", b"1")])
    )
    gc(store)
    assert not has_bytes(store, other.folder)
    assert find(store, work).manifest == other.manifest
    assert verify(store).problems == []


# What a reader meets.


def test_retired_files_are_named_with_time_and_rule_to_whoever_reads_them(store) -> None:
    gc(store, "last=1")
    ((folder, manifest),) = committed(store, 3, "rollout")
    tombstone = read_tombstone(store, folder)
    assert tombstone.files == manifest.shards
    with pytest.raises(RetiredError) as refused:
        read_table(store, folder, manifest)
    assert f"{folder} was retired by ratchet gc at {tombstone.when} (keep last=1)" in str(
        refused.value
    )


def test_missing_file_of_a_commit_that_was_not_retired_is_still_an_integrity_failure(store) -> None:
    gc(store, "last=1")
    ((folder, manifest),) = committed(store, LAST, "rollout")
    store.remove(f"{folder}/{manifest.shards[0].name}")
    with pytest.raises(IntegrityError, match="no file"):
        read_table(store, folder, manifest)
    assert len(verify(store).problems) == 1


def test_verify_counts_the_retired_apart_and_reads_what_is_to_be_there(store, ratchet) -> None:
    before = verify(store)
    gc(store, "last=1")
    found = verify(store)
    assert found.manifests == before.manifests == 12 * 3 + 4
    assert (found.retired, found.files) == (11 * 3 + 3, 2 + 2 + 2 + 4)
    code, out, _ = ratchet("verify", store.url)
    assert code == 0
    assert out.startswith("whole: 40 manifests, 10 files")
    assert "36 of the manifests retired" in out


def test_verify_names_a_tombstone_that_is_not_its_manifests(store) -> None:
    gc(store, "last=1")
    ((folder, _),) = committed(store, 3, "score")
    body = json.loads(store.read(f"{folder}/{TOMBSTONE}"))
    body["files"][0]["digest"] = "0" * 64
    store.put(f"{folder}/{TOMBSTONE}", json.dumps(body).encode())
    (problem,) = verify(store).problems
    assert folder in problem
    assert "retired files" in problem
    store.put(f"{folder}/{TOMBSTONE}", b"{")
    (problem,) = verify(store).problems
    assert TOMBSTONE in problem


def test_status_and_samples_of_retired_iterations_say_so(store, ratchet) -> None:
    gc(store, "last=1")
    found = run_status(store.url)
    assert found["finished_iterations"] == LAST
    assert found["snapshots"] == [12]
    retired = {row["iteration"] for row in found["stages"] if row["is_retired"]}
    assert retired == {*range(1, 12)}
    _, out, _ = ratchet("status", store.url)
    assert [line.endswith("retired") for line in out.splitlines()[1:13]] == [True] * 11 + [False]
    assert ratchet("samples", store.url)[0] == 0
    code, _, err = ratchet("samples", store.url, "--iteration", "3")
    assert code == 2
    (line,) = err.splitlines()
    assert "was retired by ratchet gc at" in line


# Pins.


def test_pinned_policies_and_iterations_stay_whatever_the_rules_say(store) -> None:
    write_pin(store, "a", policies=[2])
    write_pin(store, "b", iterations=[5])
    gc(store, "last=1")
    assert whole_iterations(store) == {1, 2, 5, 12}
    assert set(snapshots(store)) == {12}


def test_pin_that_comes_while_gc_runs_ends_it_before_anything_more_goes(store) -> None:
    plan = plan_collection(store, [parse_rule("last=1")])
    num_calls = 0

    def pin_at_the_third() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            write_pin(store, "late", policies=[8])

    store.guard = pin_at_the_third
    with pytest.raises(PinsChangedError, match="run gc again"):
        collect(store, plan)
    assert sum(path.endswith(TOMBSTONE) for path in walk(store)) == 2


def test_pin_commands_pin_list_and_unpin(store, ratchet) -> None:
    code, out, _ = ratchet("gc", store.url, "--pin", "5")
    assert code == 0
    assert f"ratchet gc {store.url} --unpin user-000005" in out
    _, out, _ = ratchet("gc", store.url, "--keep", "last=1")
    assert "pinned by user: policies 5" in out
    assert "policies within reach: 3 to 5, 12" in out
    assert whole_iterations(store) == {4, 5, 12}
    assert ratchet("gc", store.url, "--unpin", "user-000005")[0] == 0
    ratchet("gc", store.url, "--keep", "last=1")
    assert whole_iterations(store) == {12}


def test_pin_of_a_policy_that_is_gone_is_refused_and_leaves_no_pin(store, ratchet) -> None:
    gc(store, "last=2")
    code, _, err = ratchet("gc", store.url, "--pin", "5")
    assert code == 2
    assert "was let go by ratchet gc; there are 9 to 12" in err
    assert ratchet("gc", store.url, "--pin", "13")[2].endswith(
        "is not committed; there are 9 to 12\n"
    )
    assert store.names("pins") == []


def test_pin_of_a_branch_that_is_there_is_not_removed(store, ratchet) -> None:
    write_pin(store, "child-000003", "../child", "branch", policies=[3])
    child = Store(f"{store.url.rpartition('/')[0]}/child")
    child.put("run.json", b"{}")
    code, _, err = ratchet("gc", store.url, "--unpin", "child-000003")
    assert code == 2
    assert f"run {child.url} goes on from what 'child-000003' pins" in err
    child.remove("run.json")
    assert ratchet("gc", store.url, "--unpin", "child-000003")[0] == 0
    assert ratchet("gc", store.url, "--unpin", "child-000003")[0] == 2


# Orphans.


def litter(store: Store) -> dict[str, str]:
    """What dead attempts left, by path; and beside it, what may still be of use."""
    ((update, _),) = committed(store, 4, "update")
    left = {
        f"{update}/shard-00007.{'0' * 64}.arrow": "no manifest names it",
        f"{update}/.tmp-1": "half-written",
        "iteration-000004/rollout/0123/shard-00000.arrow": "beside what was committed",
        "iteration-000004/rollout/0123/attempt-00001.json": "beside what was committed",
        "iteration-000013/rollout/0123/.tmp-2": "half-written",
        "policy/000005/0123/weights-00000.safetensors": "an attempt at a snapshot",
    }
    useful = [
        f"{update}/attempt-00002.json",
        "iteration-000013/rollout/0123/shard-00000.arrow",
        "iteration-000013/rollout/4567/shard-00000.arrow",
        "policy/000012/0123/weights-00000.safetensors",
        "policy/000013/0123/weights-00000.safetensors",
        "prompts/0123/shard-00000.arrow",
        "notes/by-hand.txt",
    ]
    for path in [*left, *useful]:
        store.put(path, b"12")
    return left


def test_gc_removes_what_dead_attempts_left_and_nothing_else(store) -> None:
    before = walk(store)
    left = litter(store)
    left |= {f"lease/{n}.json": "a lease that is over" for n in ("000001", "000009")}
    for path in ("lease/000001.json", "lease/000009.json", "lease/000010.json", "tracking.json"):
        store.put(path, b"12")
    after = walk(store).keys() - left.keys()
    plan = plan_collection(store)
    assert {path: size for path, size, _ in plan.lines()} == dict.fromkeys(left, 2)
    for path, _, why in plan.lines():
        assert left[path] in why
    collect(store, plan)
    assert walk(store).keys() == after
    assert before.keys() <= after
    assert verify(store).problems == []


def test_gc_keeps_the_ledger_that_only_provenance_names(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    work = Work("rollouts", "rollout", 1, 1, {}, {})

    def make() -> Product:
        shards = [write_file(store, work.folder, "shard", "arrow", b"1")]
        return Product(shards, provenance={"ledger": write_ledger(store, work.folder, [])})

    find_or_make(store, work, make)
    before = walk(store)
    gc(store)
    assert walk(store) == before
    assert sum("ledger." in path for path in before) == 1


def test_gc_on_s3_aborts_dead_uploads_of_this_run_and_frees_what_it_frees_on_disk(
    s3_server, request, store
) -> None:
    top = f"{BUCKET}/{request.node.name}"
    run = Store(f"s3://{top}/run")
    for path in walk(store):
        run.put(path, store.read(path))
    uploads = {}
    for name in ("run", "run2"):
        where = {"Bucket": BUCKET, "Key": f"{request.node.name}/{name}/policy/000009/a/weights"}
        uploads[name] = run.fs.call_s3("create_multipart_upload", **where)["UploadId"]
    gc(store, "last=2")
    gc(run, "last=2")
    assert walk(run).keys() == walk(store).keys()
    assert verify(run).problems == []
    prefix = f"{request.node.name}/"
    left = run.fs.call_s3("list_multipart_uploads", Bucket=BUCKET, Prefix=prefix)["Uploads"]
    assert [upload["UploadId"] for upload in left] == [uploads["run2"]]


# Interruption.


class Stopped(BaseException):
    """The process ends here."""


class Stopping(Store):
    """A store whose process ends at the n-th change, just before it or just after."""

    def __init__(self, url: str, at: int, is_done: bool) -> None:
        super().__init__(url)
        self.at, self.is_done, self.num_changes = at, is_done, 0

    def create(self, path: str, data: bytes) -> None:
        self._change(lambda: super(Stopping, self).create(path, data))

    def remove(self, path: str) -> None:
        self._change(lambda: super(Stopping, self).remove(path))

    def _change(self, change: Callable[[], None]) -> None:
        self.num_changes += 1
        if self.num_changes != self.at:
            change()
            return
        if self.is_done:
            change()
        raise Stopped


def state_of(store: Store) -> dict[str, object]:
    """Every file's bytes; of a tombstone all but the time."""
    found: dict[str, object] = {path: store.read(path) for path in walk(store)}
    for path in found:
        if path.endswith(TOMBSTONE):
            found[path] = {**json.loads(store.read(path)), "when": None}
    return found


def assert_bytes_or_tombstone(store: Store) -> None:
    for path in walk(store):
        folder, _, name = path.rpartition("/")
        if name != FILE_NAME or read_tombstone(store, folder):
            continue
        for shard in read_manifest(store, folder).shards:
            read_file(store, folder, shard)


@pytest.mark.parametrize("is_done", [False, True])
def test_gc_interrupted_at_any_change_then_run_again_ends_where_one_run_ends(
    tmp_path: Path, is_done: bool
) -> None:
    whole, made = small_run(small_plan(tmp_path, iterations=3), [1, 2, 3])
    for iteration in (1, 2):
        write_snapshot(whole, made[iteration].update)
    whole.put("policy/000001/0123/weights", b"an orphan")
    source = Path(whole.root)

    def copy(name: str) -> Path:
        shutil.copytree(source, tmp_path / name)
        return tmp_path / name

    expected = Stopping(str(copy("undisturbed")), at=-1, is_done=False)
    gc(expected, "last=1")
    # 3 needs snapshot 2 and iteration 3: two iterations of 2 + 2 + 2 shards go, a snapshot of 4.
    assert expected.num_changes == 2 * (3 + 6) + (1 + 4) + 1
    for at in range(1, expected.num_changes + 1):
        url = str(copy(f"stopped-{at}"))
        with pytest.raises(Stopped):
            gc(Stopping(url, at, is_done), "last=1")
        store = Store(url)
        assert_bytes_or_tombstone(store)
        assert verify(store).problems == []
        assert newest_snapshot(store, updates(store, 3)) == 2
        gc(store, "last=1")
        assert state_of(store) == state_of(expected)
        shutil.rmtree(url)


def test_gc_finishes_what_an_interrupted_one_began_under_that_ones_rule(store) -> None:
    plan = plan_collection(store, [parse_rule("last=1")])
    with pytest.raises(Stopped):
        gc(Stopping(store.url, 2, is_done=False), "last=1")
    (folder,) = [r.folder for r in plan.retirements if store.exists(f"{r.folder}/{TOMBSTONE}")]
    assert has_bytes(store, folder)
    gc(store)
    assert not has_bytes(store, folder)
    assert read_tombstone(store, folder).rule == "keep last=1"
    assert sum(path.endswith(TOMBSTONE) for path in walk(store)) == 1


def test_gc_that_may_not_write_any_more_removes_nothing_more(store) -> None:
    before = walk(store)

    def refuse() -> None:
        raise PermissionError("another writer holds the run")

    store.guard = refuse
    with pytest.raises(PermissionError):
        gc(store, "last=1")
    assert walk(store) == before


def test_gc_of_a_run_with_a_spoiled_manifest_removes_nothing(store, ratchet) -> None:
    ((folder, _),) = committed(store, 2, "score")
    store.put(f"{folder}/{FILE_NAME}", b"{")
    before = walk(store)
    code, _, err = ratchet("gc", store.url, "--keep", "last=1")
    assert code == 3
    assert folder in err
    assert walk_without_lease(store) == before


# The command.


def test_gc_dry_run_removes_nothing_and_lists_what_the_real_one_removes(store, ratchet) -> None:
    ratchet("gc", store.url)  # leaves a lease
    litter(store)
    before = walk(store)
    code, out, _ = ratchet("gc", store.url, "--keep", "last=2", "--dry-run", "--json")
    planned = json.loads(out)
    assert code == 0
    assert walk(store) == before
    code, out, _ = ratchet("gc", store.url, "--keep", "last=2", "--json")
    done = json.loads(out)
    assert code == 0
    gone = {path: size for path, size in before.items() if path not in walk(store)}
    for found in (planned, done):
        assert {line["path"]: line["bytes"] for line in found["removed"]} == gone
        assert (found["files"], found["bytes"]) == (len(gone), sum(gone.values()))
        assert found["policies"] == [9, 10, 11, 12]
    assert planned == {**done, "dry_run": True}


def test_gc_leaves_its_own_lease_alone_of_all(store, ratchet) -> None:
    for number in (1, 2, 3):
        ratchet("gc", store.url)
        assert store.names("lease") == [f"{number:06d}.json"]


def test_gc_of_a_run_that_another_writes_in_is_refused_and_a_dry_run_is_not(store, ratchet) -> None:
    before = walk(store)
    with hold(store, ttl_seconds=0.3):
        code, _, err = ratchet("gc", store.url, "--keep", "last=1")
        assert ratchet("gc", store.url, "--keep", "last=1", "--dry-run")[0] == 0
    assert code == 4
    assert "is held by process" in err
    assert walk_without_lease(store) == before


def test_gc_prints_a_line_a_folder_with_the_reason_and_the_totals(store, ratchet) -> None:
    sizes = walk(store)
    _, out, _ = ratchet("gc", store.url, "--keep", "every=3", "--dry-run")
    head, *lines, _, total, reach = out.splitlines()
    assert head.split() == ["folder", "files", "bytes", "why"]
    assert len(lines) == 8 * 3
    ((folder, _),) = committed(store, 1, "rollout")
    num_bytes = sum(sizes[f"{folder}/{s.name}"] for s in read_manifest(store, folder).shards)
    assert lines[0].split()[:3] == [folder, "2", f"{num_bytes:,}"]
    assert lines[0].endswith("no policy that is kept needs it (keep every=3)")
    ((_, manifest),) = committed(store, 1, "score")
    assert lines[1].split()[1] == str(len(manifest.shards))
    assert total.startswith("would free 0.")
    assert total.endswith(f" MiB in 48 files of {store.url}")
    assert reach == "policies within reach: 3, 6, 9, 12"
    _, out, _ = ratchet("gc", store.url, "--keep", "every=3")
    assert out.splitlines()[-2] == total.replace("would free", "freed")
    _, out, _ = ratchet("gc", store.url, "--keep", "every=3")
    # Of the one before, its lease.
    assert f"freed 0.0 MiB in 1 files of {store.url}" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--keep", "newest=1"], "--keep 'newest=1' is no rule"),
        (["--keep", "version=13"], "--keep version=13: no such policy is within reach"),
        (["--keep", "best=rewards"], "there are reward/mean, rollout/response_tokens"),
        (["--pin", "3", "--keep", "last=1"], "one at a time"),
        (["--pin", "3", "--unpin", "a"], "one at a time"),
        (["--unpin", "a"], "there is no pin 'a'; there are none"),
    ],
)
def test_gc_that_can_not_be_is_refused_in_a_sentence_with_exit_two(
    store, ratchet, args, words
) -> None:
    before = walk(store)
    code, _, err = ratchet("gc", store.url, *args)
    assert code == 2
    (line,) = err.splitlines()
    assert words in line
    assert walk_without_lease(store) == before


def test_gc_of_no_run_ends_with_one_sentence(tmp_path, ratchet) -> None:
    code, _, err = ratchet("gc", str(tmp_path))
    assert code == 2
    assert "there is no run at" in err
