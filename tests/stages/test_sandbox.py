"""Programs that attack the machine they run on, for real; and programs that pass their tests."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from stages.score import sandbox
from stages.score.builtin.code import code_tests, parsed_tests
from stages.score.sandbox import Limits, run_bare, run_sandboxed

LIMITS = Limits(seconds=3.0, memory_bytes=256 << 20)


def test_program_runs_with_its_input_and_sees_only_the_interpreter() -> None:
    program = "import os, sys; print(sys.stdin.read(), sorted(os.listdir('.')), os.environ['HOME'])"
    ran = run_sandboxed(program, "in", LIMITS)
    assert (ran.status, ran.limit, ran.stderr) == (0, None, "")
    assert ran.stdout == "in ['main.py'] /box\n"


def test_program_that_fails_gives_its_status_and_words() -> None:
    ran = run_sandboxed("import sys; print('é'); sys.exit(7)", limits=LIMITS)
    assert (ran.status, ran.stdout) == (7, "é\n")
    assert run_sandboxed("import os; os.kill(os.getpid(), 9)", limits=LIMITS).status == -9


def test_fork_bomb_is_held_to_its_number_of_processes() -> None:
    program = """
import os, time
made = 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(60)
    except OSError as error:
        print(made, error.errno)
        break
    made += 1
"""
    ran = run_sandboxed(program, limits=LIMITS)
    made, errno = map(int, ran.stdout.split())
    assert made < LIMITS.processes
    assert errno == 11


def test_fork_bomb_that_never_stops_ends_with_its_time_and_leaves_nothing() -> None:
    before = {p.pid for p in psutil.process_iter()}
    program = (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    )
    ran = run_sandboxed(program, limits=LIMITS)
    assert ran.limit in ("time", "processes")
    uids = {p.uids().real for p in psutil.process_iter() if p.pid not in before}
    assert not [uid for uid in uids if uid >= 0x40000000]


def test_memory_bomb_is_stopped_in_one_process_and_over_all_of_them() -> None:
    one = run_sandboxed("x = bytearray(1 << 34)", limits=LIMITS)
    assert one.status == 1
    assert "MemoryError" in one.stderr
    program = """
import os
for _ in range(3):
    os.fork()
kept = []
while True:
    kept.append(b"x" * (1 << 20))
"""
    assert run_sandboxed(program, limits=LIMITS).limit == "memory"


def test_write_outside_its_folder_fails_and_the_machine_is_untouched(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.write_text("before")
    places = [str(target), "/etc/passwd", "/usr/evil", f"{sys.prefix}/evil", "/evil", "/proc/1/mem"]
    program = f"""
for place in {places!r}:
    try:
        open(place, "w").write("after")
        print("WROTE", place)
    except OSError:
        pass
open("kept", "w").write("x")
print(open("kept").read())
"""
    assert run_sandboxed(program, limits=LIMITS).stdout == "x\n"
    assert target.read_text() == "before"
    assert not any(os.path.exists(p) for p in ("/usr/evil", f"{sys.prefix}/evil", "/evil"))


def test_read_of_the_machines_files_fails(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o644)
    program = f"import os; print(os.path.exists({str(secret)!r}), os.path.exists('/etc/passwd'))"
    assert run_sandboxed(program, limits=LIMITS).stdout == "False False\n"


def test_files_are_bounded_each_and_together() -> None:
    one = run_sandboxed("open('big', 'wb').write(bytes(1 << 27))", limits=LIMITS)
    assert "File too large" in one.stderr
    program = "for n in range(9): open(str(n), 'wb').write(bytes(8 << 20))"
    assert "No space left" in run_sandboxed(program, limits=LIMITS).stderr
    endless = run_sandboxed("while True: print('x' * 9999)", limits=LIMITS)
    assert endless.status != 0
    assert len(endless.stdout) == LIMITS.output_bytes


def test_network_call_reaches_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        port = server.getsockname()[1]
        program = f"""
import socket
for address in [("127.0.0.1", {port}), ("1.1.1.1", 53)]:
    try:
        socket.create_connection(address, timeout=1)
        print("REACHED", address)
    except OSError:
        print("no")
"""
        assert run_sandboxed(program, limits=LIMITS).stdout == "no\nno\n"
        with pytest.raises(BlockingIOError):
            server.accept()


def test_endless_loop_ends_with_its_time() -> None:
    start = time.monotonic()
    ran = run_sandboxed("while True: pass", limits=Limits(seconds=1.0))
    assert (ran.status, ran.limit) == (None, "time")
    assert time.monotonic() - start < 1.0 + sandbox._GRACE_SECONDS


def test_program_has_no_capability_and_sees_no_process_but_its_own() -> None:
    program = """
import os
lines = dict(l.split(":", 1) for l in open("/proc/self/status").read().splitlines())
print(lines["CapEff"].strip(), lines["NoNewPrivs"].strip())
print(sorted(n for n in os.listdir("/proc") if n.isdigit()) == sorted({"1", str(os.getpid())}))
try:
    os.kill(1, 9)
except PermissionError:
    print("denied")
"""
    assert run_sandboxed(program, limits=LIMITS).stdout == "0000000000000000 1\nTrue\ndenied\n"


def test_sandbox_leaves_no_folder_behind() -> None:
    folder = Path(tempfile.gettempdir())
    before = set(folder.glob("ratchet-sandbox-*"))
    run_sandboxed("print()", limits=LIMITS)
    assert set(folder.glob("ratchet-sandbox-*")) <= before


def without_rights(*options: str) -> "subprocess.CompletedProcess[str]":
    code = (
        "from stages.score.sandbox import *; print(run_sandboxed('import os; print(os.getuid())'))"
    )
    return subprocess.run(
        ["setpriv", *options, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


needs_setpriv = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="drops rights, as root"
)


@needs_setpriv
def test_sandbox_without_the_right_to_mount_uses_a_user_namespace() -> None:
    done = without_rights("--bounding-set=-sys_admin", "--inh-caps=-sys_admin")
    assert "status=0" in done.stdout, done.stderr
    assert "1000\\n" in done.stdout


@needs_setpriv
def test_sandbox_where_the_kernel_gives_no_namespaces_refuses_in_a_sentence() -> None:
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", sys.executable, "-c", REFUSED],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "this machine can't isolate programs" in done.stdout, done.stderr
    assert "isolation: none" in done.stdout


REFUSED = """
from stages.score.builtin.code import check_code_tests
from stages.score.sandbox import NoIsolationError

with open("/proc/sys/user/max_mnt_namespaces", "w") as file:
    file.write("0")
check_code_tests(isolation="none")
try:
    check_code_tests()
except NoIsolationError as error:
    print(error)
"""


def test_bare_run_keeps_time_and_memory_of_a_process() -> None:
    assert run_bare("print(input())", "a", LIMITS).stdout == "a\n"
    start = time.monotonic()
    assert run_bare("import time; time.sleep(60)", limits=Limits(seconds=0.5)).limit == "time"
    assert time.monotonic() - start < 5
    assert "MemoryError" in run_bare("bytearray(1 << 34)", limits=LIMITS).stderr


ASSERTS = json.dumps(["assert f(1) == 2", "assert f(2) == 3", "assert f(0) == 5"])
PAIRS = json.dumps([{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4\n"}])


@pytest.mark.parametrize(
    ("program", "tests", "whole", "partial"),
    [
        ("def f(x): return x + 1", ASSERTS, 0.0, 2 / 3),
        ("def f(x): return x + 1 if x else 5", ASSERTS, 1.0, 1.0),
        ("def f(x): return x + 1", "assert f(1) == 2\nassert f(3) == 4", 1.0, 1.0),
        ("def f(x):", ASSERTS, 0.0, 0.0),
        ("import os; os._exit(0)", ASSERTS, 0.0, 0.0),
        ("import sys; sys.exit(0)", ASSERTS, 0.0, 0.0),
        ("print('0 1 2')\nimport os; os._exit(0)", ASSERTS, 0.0, 0.0),
        ("print(sum(map(int, input().split())))", PAIRS, 1.0, 1.0),
        ("print(3)", PAIRS, 0.0, 0.5),
        ("print(3)", None, None, None),
        ("print(3)", "[]", None, None),
    ],
)
def test_code_is_rewarded_for_the_tests_it_passes(program, tests, whole, partial) -> None:
    text = f"First:\n```python\nnonsense(\n```\nBetter:\n```python\n{program}\n```\nDone."
    assert code_tests(text, tests, seconds=5.0) == whole
    assert code_tests(text, tests, partial=True, seconds=5.0) == partial
    if whole is not None:
        assert code_tests(program, tests, seconds=5.0) == whole


def test_code_tests_of_no_known_kind_are_an_error() -> None:
    with pytest.raises(ValueError, match="a list of texts, or of mappings"):
        parsed_tests('[1, "a"]')
