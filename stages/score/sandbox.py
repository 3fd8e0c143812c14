"""Running a program that nobody has read: a model's code, with no way to the machine.

On Linux, in namespaces of its own (mounts, network, processes): it sees the Python installation
read-only, an empty folder in memory, no network, no other process; its time, memory, files and
number of processes are bounded. Where the kernel gives no namespaces, it is not run: being asked
to do without them is the caller's explicit word.

This bounds what a program does, and is no virtual machine: it shares the kernel.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

_INIT = Path(__file__).with_name("sandbox_init.py")
# The init keeps time; the outer clock is for an init that is itself stuck.
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: of the wall, and of the processor in each of its processes.
        memory_bytes: resident, of all its processes; address space of each.
        file_bytes: of a file, standard output included; ``folder_bytes``: of all files together.
        processes: and threads, at one time.
        output_bytes: of standard output and error that are read, each.
    """

    seconds: float = 10.0
    memory_bytes: int = 512 << 20
    file_bytes: int = 16 << 20
    folder_bytes: int = 32 << 20
    processes: int = 16
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Ran:
    """How a program ended. ``status`` is its exit status, below 0 the signal that ended it;
    None where it passed ``limit``: time, memory or processes."""

    status: int | None
    limit: str | None
    stdout: str
    stderr: str

    @property
    def is_ok(self) -> bool:
        """Whether it came to its end by itself, with status 0."""
        return self.status == 0


class NoIsolationError(ValueError):
    """This machine can't shut a program off."""


def run_sandboxed(program: str, stdin: str = "", limits: Limits | None = None) -> Ran:
    """Run the Python ``program`` to its end, or to a limit.

    Raises:
        NoIsolationError: the kernel refused namespaces; the program was not run.
    """
    limits = limits or Limits()
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="ratchet-sandbox-"))
        text, reading, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        _fill(text, program)
        _fill(reading, stdin)
        read_fd, report_fd = os.pipe()
        stack.callback(os.close, read_fd)
        order = {
            **asdict(limits),
            "root": root,
            "python": sys.executable,
            "interpreter": _interpreter(),
            "program_fd": text.fileno(),
            "report_fd": report_fd,
        }
        command = [sys.executable, "-I", "-S", str(_INIT), json.dumps(order)]
        try:
            seconds = limits.seconds + _GRACE_SECONDS
            fds = (text.fileno(), report_fd)
            status = _wait(command, reading, out, err, seconds, pass_fds=fds)
        finally:
            os.close(report_fd)
        reported = os.read(read_fd, 1 << 16) or b'{"error": "nothing was reported"}'
        found: dict[str, Any] = {"limit": "time"} if status is None else json.loads(reported)
        if "error" in found:
            raise NoIsolationError(
                f"this machine can't isolate programs ({found['error']}): allow user namespaces, "
                "or set options: {isolation: none} where what is run can be trusted"
            )
        return Ran(found.get("status"), found.get("limit"), _head(out, limits), _head(err, limits))


def run_bare(program: str, stdin: str = "", limits: Limits | None = None) -> Ran:
    """Run ``program`` with limits on each of its processes and without isolation.

    It can read, write and reach all that this process can. For programs that can be trusted.
    """
    limits = limits or Limits()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ratchet-program-"))
        reading, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        Path(folder, "main.py").write_text(program)
        _fill(reading, stdin)
        command = [sys.executable, "-I", f"{folder}/main.py"]
        environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"}
        status = _wait(
            command,
            reading,
            out,
            err,
            limits.seconds,
            cwd=folder,
            env=environment,
            preexec_fn=_limiter(limits),
        )
        limit = "time" if status is None else None
        return Ran(status, limit, _head(out, limits), _head(err, limits))


@lru_cache(maxsize=1)
def check_isolation() -> None:
    """Raise NoIsolationError where :func:`run_sandboxed` would."""
    run_sandboxed("")


def _wait(
    command: list[str], stdin: IO[bytes], out: IO[bytes], err: IO[bytes], seconds: float, **how: Any
) -> int | None:
    """Exit status of ``command``; None where it was ended after ``seconds``."""
    process = subprocess.Popen(
        command, stdin=stdin, stdout=out, stderr=err, start_new_session=True, **how
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _limiter(limits: Limits) -> Callable[[], None]:
    values: Mapping[int, int] = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: int(limits.seconds) + 1,
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
    }

    def limit() -> None:
        for name, value in values.items():
            resource.setrlimit(name, (value, value))

    return limit


def _interpreter() -> list[str]:
    """Folders that Python runs from: the installation, and the virtual environment on it."""
    real = os.path.realpath(sys.executable)
    return list(dict.fromkeys([sys.base_prefix, sys.prefix, str(Path(real).parent.parent)]))


def _fill(file: IO[bytes], text: str) -> None:
    file.write(text.encode("utf-8", "surrogatepass"))
    file.flush()
    file.seek(0)


def _head(file: IO[bytes], limits: Limits) -> str:
    file.seek(0)
    return file.read(limits.output_bytes).decode("utf-8", "replace")
