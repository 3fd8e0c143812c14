"""One writer per run, from the command line down: who is refused, with which words, how early."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from prefect.states import Failed

import tiny
from artifacts.errors import HeldError, LeaseLostError
from artifacts.lease import FOLDER, hold, read_newest
from artifacts.store import Store
from flows.cli import _explain
from flows.config import Config, UserError, load_config
from flows.holding import hold_run
from flows.plan import make_plan
from flows.record import open_run
from flows.train import _is_worth_a_retry, train
from holders import write_lease
from s3_server import BUCKET, S3Server

HEAVY = ("torch", "vllm", "ray", "mlflow", "prefect", "transformers")

# The command as users start it, and what it had loaded when it ended.
RATCHET = f"""
import json, sys
from flows.cli import main
sys.argv = ["ratchet", *sys.argv[1:]]
try:
    main()
finally:
    print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one-writer")
    tiny.save_model(folder / "model")
    tiny.save_prompts(folder / "data.jsonl")
    (folder / "rewards.py").write_text("def fine(text, **row):\n    return 0.0\n")
    config = {
        "model": "model",
        "iterations": 1,
        "data": {"path": "data.jsonl", "template": "plain", "batch_size": 8},
        "rollout": {"max_new_tokens": 8},
        "score": {"rewards": [{"fn": "rewards.py:fine"}]},
        "lease": {"ttl_seconds": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def config(bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A configuration whose runs are the test's own."""
    monkeypatch.chdir(bench)
    return load_config("run.yaml", [f"store={tmp_path / 'runs'}"])


def ratchet(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", RATCHET, *args], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "command",
    [
        ["train", "run.yaml", "store={store}"],
        ["train", "run.yaml", "store={store}", "--debug"],
        ["train", "run.yaml", "store={store}", "update.lr=0.5", "--allow-change"],
        ["resume", "{store}/run"],
        ["stage", "rollout", "{store}/run", "--iteration", "1"],
    ],
    ids=" ".join,
)
def test_command_that_writes_in_a_held_run_exits_4_before_anything_heavy(
    config: Config, command: list[str]
) -> None:
    store = open_run(make_plan(config)).store
    before = store.names("")
    with hold(store, 1):
        since = read_newest(store).since
        done = ratchet(*(part.format(store=config.store) for part in command))
    assert done.returncode == 4, done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"ratchet: run {config.url} is held by process {os.getpid()} on {socket.gethostname()} "
        f"since {since}: wait until it has ended, or end it and resume the run"
    )
    assert json.loads(done.stdout) == []
    assert store.names("") == sorted([*before, FOLDER])
    assert store.names(FOLDER) == ["000001.json"]


def test_command_that_reads_asks_nobody(config: Config) -> None:
    store = open_run(make_plan(config)).store
    with hold(store, 30):
        for command in (["status", store.url], ["verify", store.url]):
            assert ratchet(*command).returncode == 0


def test_flow_called_by_itself_is_refused_a_held_run(config: Config) -> None:
    with (
        hold(open_run(make_plan(config)).store, 1),
        pytest.raises(HeldError, match=f"process {os.getpid()}"),
    ):
        train.fn(config, debug=True)


def test_run_held_again_inside_is_the_same_lease(config: Config) -> None:
    outer, inner = Store(config.url), Store(config.url)
    with hold_run(outer, config):
        with hold_run(inner, config):
            assert outer.names(FOLDER) == ["000001.json"]
            write_lease(outer, token=2)
            for store in (inner, outer):
                with pytest.raises(LeaseLostError):
                    store.guard()
        inner.guard()
        with pytest.raises(LeaseLostError):
            outer.guard()
    outer.guard()


def test_another_run_inside_a_held_one_has_a_lease_of_its_own(config: Config) -> None:
    outer, inner = Store(config.url), Store(f"{config.url}-2")
    with hold_run(outer, config), hold_run(inner, config):
        assert [store.names(FOLDER) for store in (outer, inner)] == [["000001.json"]] * 2


def test_another_thread_is_another_writer(config: Config) -> None:
    refusals: list[HeldError] = []

    def write() -> None:
        try:
            with hold_run(Store(config.url), config):
                pass
        except HeldError as error:
            refusals.append(error)

    with hold_run(Store(config.url), config):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert [error.pid for error in refusals] == [os.getpid()]


@pytest.mark.parametrize("error", [HeldError("a", "b", 1, "c"), LeaseLostError("a", "b")])
def test_lease_errors_exit_4_and_are_not_tried_again(error: Exception, capsys) -> None:
    assert _explain(error) == 4
    assert capsys.readouterr().err == f"ratchet: {error}\n"
    assert not _is_worth_a_retry(None, None, Failed(data=error))
    assert _is_worth_a_retry(None, None, Failed(data=OSError("the store is away")))


def test_store_that_overwrites_is_refused_in_a_sentence_and_left_empty(
    bench: Path, rclone: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench)
    done = ratchet("train", "run.yaml", f"store=s3://{BUCKET}/runs")
    assert done.returncode == 2
    assert done.stderr == (
        f"ratchet: store 's3://{BUCKET}/runs' overwrites where exclusive creation is asked for, "
        "so that a second writer would not be kept out: use one that honours If-None-Match, or "
        "set lease.single_writer=true and see to it yourself\n"
    )
    assert Store(f"s3://{BUCKET}/runs/run").names("") == []


def test_store_that_overwrites_is_written_where_the_user_vouches_for_one_writer(
    bench: Path, rclone: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench)
    overrides = [f"store=s3://{BUCKET}/runs"]
    trusted = load_config("run.yaml", [*overrides, "lease.single_writer=true"])
    store = open_run(make_plan(trusted)).store
    with hold_run(store, trusted):
        assert read_newest(store).process.pid == os.getpid()
    assert read_newest(store).released
    # A run that is there is no reason to trust its store: it may have been copied.
    untrusted = load_config("run.yaml", overrides)
    with pytest.raises(UserError, match="overwrites"), hold_run(store, untrusted):
        pass


@pytest.mark.parametrize("server", ["s3_server", "moto"])
def test_store_that_creates_exclusively_is_taken(
    bench: Path, server: str, request, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(server)
    monkeypatch.chdir(bench)
    config = load_config("run.yaml", [f"store=s3://{BUCKET}/{server}-runs"])
    store = open_run(make_plan(config)).store
    assert store.names("") == ["run.json"]
    with hold_run(store, config):
        assert store.names("") == [FOLDER, "run.json"]


def test_store_that_cannot_be_written_is_refused_in_a_sentence(config: Config) -> None:
    store = open_run(make_plan(config)).store
    Path(store.url, FOLDER).write_text("in the way")
    with pytest.raises(UserError, match="can't be written"), hold_run(store, config):
        pass
