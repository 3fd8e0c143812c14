"""Which process, of which boot of which machine: enough to say for certain that it has ended.

Read from /proc. Where that is missing, or shows another world than this process lives in,
nothing can be said for certain, and nothing is.
"""

import os
from dataclasses import dataclass
from pathlib import Path

# Of a process that has ended, and of one whose parent has not looked yet.
_DEAD = ("X", "Z")


@dataclass(frozen=True)
class Process:
    """A process, told apart from every other that has or had its number.

    Attributes:
        pid: its number, in its pid namespace.
        boot: the kernel's random id of the boot that it runs in.
        pid_namespace: where its number means something, such as ``pid:[4026531836]``.
        start: when it started, in clock ticks since that boot.

    The last three are None where they can't be known.
    """

    pid: int
    boot: str | None = None
    pid_namespace: str | None = None
    start: int | None = None


def this_process() -> Process:
    """This process."""
    pid = os.getpid()
    try:
        # In a pid namespace that has not mounted its own, /proc numbers processes otherwise.
        if int(os.readlink("/proc/self")) != pid:
            return Process(pid)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        _, start = _state_and_start(pid)
        return Process(pid, boot, os.readlink("/proc/self/ns/pid"), start)
    except OSError:
        return Process(pid)


def has_ended(process: Process) -> bool:
    """Whether ``process`` is certain to have ended: not where it may live out of sight."""
    here = this_process()
    if process.start is None or here.start is None:
        return False
    if (process.boot, process.pid_namespace) != (here.boot, here.pid_namespace):
        return False
    try:
        state, start = _state_and_start(process.pid)
    except FileNotFoundError:
        # Where /proc hides other users' processes (hidepid), it hides the first one too.
        return os.path.exists("/proc/1/stat")
    except OSError:
        return False
    return state in _DEAD or start != process.start


def _state_and_start(pid: int) -> tuple[str, int]:
    # Fields 3 and 22 of proc_pid_stat(5). Field 2, a name in parentheses, may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])
