"""Which processes are certain to have ended, and which may live where nobody sees them."""

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from artifacts.processes import Process, has_ended, this_process
from child import run_child, start_child

NAMER = """
import json
from dataclasses import asdict
from artifacts.processes import this_process
print(json.dumps(asdict(this_process())), flush=True)
input()
"""


def test_this_process_is_told_apart_by_all_that_the_kernel_knows() -> None:
    here = this_process()
    assert here.pid == os.getpid()
    assert here.pid_namespace == os.readlink("/proc/self/ns/pid")
    # Seconds since the boot, from another road: the kernel's clock of boot time, and ps.
    uptime = float(run_child("print(open('/proc/uptime').read().split()[0])"))
    age = int(subprocess.check_output(["ps", "-o", "etimes=", "-p", str(here.pid)]))
    assert here.start / os.sysconf("SC_CLK_TCK") == pytest.approx(uptime - age, abs=2.5)


def test_process_that_lives_has_not_ended() -> None:
    assert not has_ended(this_process())


def test_process_of_an_earlier_time_with_this_number_has_ended() -> None:
    here = this_process()
    assert has_ended(replace(here, start=here.start - 1))


@pytest.mark.parametrize(
    "change",
    [
        {"boot": "another boot"},
        {"pid_namespace": "pid:[1]"},
        {"start": None},
        {"boot": None, "pid_namespace": None, "start": None},
    ],
)
def test_process_out_of_sight_is_not_said_to_have_ended(change) -> None:
    gone = replace(this_process(), start=0)
    assert has_ended(gone)
    assert not has_ended(replace(gone, **change))


def test_process_killed_has_ended_even_before_its_parent_looks() -> None:
    child = start_child(NAMER)
    try:
        process = Process(**json.loads(child.stdout.readline()))
        assert process.pid == child.pid
        assert not has_ended(process)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(process)
    finally:
        child.communicate()
    assert has_ended(process)


def test_process_stopped_has_not_ended() -> None:
    child = start_child("input()")
    try:
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        assert not has_ended(replace(this_process(), pid=child.pid, start=int(stat[19])))
    finally:
        child.kill()
        child.communicate()
