"""Rewards in processes of their own: what hangs is ended, what crashes is data."""

import os
import time

import psutil
import pytest

from child import start_child
from scoring import reward_file
from stages.contract import StageError
from stages.score.config import RewardSpec
from stages.score.environment import without_credentials
from stages.score.reward_process import RewardProcess

SOURCE = """
import asyncio
import os
import subprocess
import sys
import threading
import time


def does(text, **row):
    if text == "hang":
        threading.Event().wait()
    if text == "swallow":
        while True:
            try:
                threading.Event().wait()
            except BaseException:
                pass
    if text == "spin":
        10 ** 10 ** 10
    if text == "exit":
        os._exit(3)
    if text == "sys.exit":
        sys.exit(4)
    if text == "crash":
        os.abort()
    if text == "print":
        print("[0, [9.0, null, null]]", flush=True)
    return float(len(text))


def starts(text, folder, **row):
    child = subprocess.Popen(["sleep", "600"])
    with open(f"{folder}/pid", "w") as file:
        file.write(str(child.pid))
    threading.Event().wait()


def sees(text, **row):
    return float(text in os.environ)


def pid(text, **row):
    return os.getpid()


async def waits(text, **row):
    if text == "block":
        threading.Event().wait()
    if text == "hang":
        await asyncio.Event().wait()
    if text == "TimeoutError":
        raise TimeoutError("of its own")
    return float(len(text))


MOST = [0, 0]


async def counts(text, **row):
    MOST[0] += 1
    MOST[1] = max(MOST)
    await asyncio.sleep(0.01)
    MOST[0] -= 1
    return MOST[1]


async def begins(text, **row):
    return time.monotonic()


def batch_hangs(batch):
    threading.Event().wait()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return reward_file(tmp_path_factory.mktemp("rewards"), SOURCE)


def run(source: str, name: str, texts: list[str], **fields):
    """Values and failure messages of ``texts``, each a list in their order."""
    process = RewardProcess(RewardSpec(fn=f"{source}:{name}", **fields))
    try:
        outcomes = {i: o for i, o in process.score([{"text": t} for t in texts]) if o is not None}
    finally:
        process.close()
    assert sorted(outcomes) == list(range(len(texts)))
    ordered = [outcomes[i] for i in range(len(texts))]
    return [o.value for o in ordered], [o.failure and o.failure.message for o in ordered]


@pytest.mark.parametrize("how", ["hang", "swallow", "spin"])
def test_call_that_hangs_is_ended_and_the_rest_go_on(source, how) -> None:
    values, messages = run(source, "does", ["a", how, "bb", how, "ccc"], timeout_seconds=0.5)
    assert values == [1.0, None, 2.0, None, 3.0]
    assert messages == [None, "timed out after 0.5 s", None, "timed out after 0.5 s", None]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit", "its process exited with status 3 during the call"),
        ("crash", "its process was killed by signal 6 during the call"),
        ("sys.exit", "4"),
    ],
)
def test_call_that_ends_its_process_costs_its_own_sample(source, how, message) -> None:
    values, messages = run(source, "does", ["a", how, "bb"])
    assert values == [1.0, None, 2.0]
    assert messages == [None, message, None]


def test_call_that_prints_does_not_answer_by_it(source) -> None:
    assert run(source, "does", ["print", "a"])[0] == [5.0, 1.0]


def test_call_that_is_ended_takes_along_what_it_started(source, tmp_path) -> None:
    run(source, "starts", ["a"], timeout_seconds=1, options={"folder": str(tmp_path)})
    started = int((tmp_path / "pid").read_text())
    _, alive = psutil.wait_procs([psutil.Process(started)] if psutil.pid_exists(started) else [])
    assert not alive


def test_process_is_one_for_all_calls(source) -> None:
    process = RewardProcess(RewardSpec(fn=f"{source}:pid"))
    pids = {o.value for _ in range(3) for _, o in process.score([{"text": ""}] * 4) if o}
    assert pids == {float(process.pid)}
    process.close()
    assert not psutil.pid_exists(int(pids.pop()))


def test_async_calls_are_awaited_together_up_to_the_limit(source) -> None:
    values, _ = run(source, "counts", [""] * 12, concurrency=4)
    assert max(values) == 4


def test_async_calls_begin_at_the_asked_pace(source) -> None:
    process = RewardProcess(RewardSpec(fn=f"{source}:begins", concurrency=5, calls_per_second=50))
    values, start = [], time.monotonic()
    for count in (2, 3):  # from shard to shard, too
        values += [o.value for _, o in process.score([{"text": ""}] * count) if o is not None]
    process.close()
    assert all(value - start >= 0.02 * n for n, value in enumerate(values))


def test_async_calls_that_hang_cost_their_own_samples(source) -> None:
    texts = ["a", "hang", "bb", "block", "ccc", "TimeoutError"]
    values, messages = run(source, "waits", texts, concurrency=3, timeout_seconds=0.3)
    assert values == [1.0, None, 2.0, None, 3.0, None]
    assert messages[1] == messages[3] == "timed out after 0.3 s"
    assert messages[5] == "of its own"


def test_batch_that_hangs_costs_its_samples(source) -> None:
    values, messages = run(source, "batch_hangs", ["a", "b"], batched=True, timeout_seconds=0.3)
    assert values == [None, None]
    assert messages == ["timed out after 0.3 s"] * 2


def test_reward_that_cannot_be_loaded_says_why(tmp_path) -> None:
    path = reward_file(tmp_path, "raise RuntimeError('no licence')\n")
    process = RewardProcess(RewardSpec(fn=f"{path}:f"))
    with pytest.raises(StageError, match="no licence"):
        list(process.score([{"text": ""}]))


def test_reward_whose_process_never_gets_to_a_call_is_given_up(tmp_path) -> None:
    path = reward_file(tmp_path, "import os\nos._exit(1)\n")
    process = RewardProcess(RewardSpec(fn=f"{path}:f"))
    with pytest.raises(StageError, match="ended 3 times in a row before a call began"):
        list(process.score([{"text": ""}]))


PARENT = """
import os, signal, sys
from stages.score.config import RewardSpec
from stages.score.reward_process import RewardProcess

process = RewardProcess(RewardSpec(fn=sys.argv[1]))
for _ in process.score([{"text": "spin"}]):
    print(process.pid, flush=True)
    sys.stdin.read()
"""


def test_process_dies_with_its_parent_in_the_middle_of_a_call(source) -> None:
    parent = start_child(PARENT, f"{source}:does")
    process = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs([process], timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    "name",
    [
        "AWS_SECRET_ACCESS_KEY",
        "AWS_PROFILE",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "AZURE_STORAGE_CONNECTION_STRING",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_URI",
        "PREFECT_API_URL",
        "HF_TOKEN",
        "OPENAI_API_KEY",
        "DB_PASSWORD",
        "MY_SECRET",
        "github_token",
    ],
)
def test_process_sees_no_credential_unless_it_is_named(source, monkeypatch, name) -> None:
    monkeypatch.setenv(name, "x")
    monkeypatch.setenv("HARMLESS", "x")
    assert run(source, "sees", [name, "HARMLESS"])[0] == [0.0, 1.0]
    assert run(source, "sees", [name], environment=[name])[0] == [1.0]


def test_environment_keeps_what_programs_need() -> None:
    needed = {
        "PATH": "",
        "HOME": "",
        "LANG": "",
        "LD_LIBRARY_PATH": "",
        "TOKENIZERS_PARALLELISM": "",
    }
    assert without_credentials(needed) == needed


def test_process_holds_no_file_of_its_parent(source, tmp_path) -> None:
    with open(tmp_path / "store", "w") as file:
        os.set_inheritable(file.fileno(), True)
        process = RewardProcess(RewardSpec(fn=f"{source}:does"))
        list(process.score([{"text": ""}]))
        names = {os.path.basename(f.path) for f in psutil.Process(process.pid).open_files()}
        process.close()
    assert "store" not in names
