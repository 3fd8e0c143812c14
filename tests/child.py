"""Python in a fresh process: what a test needs to show that something holds beyond this one."""

import os
import subprocess
import sys
from collections.abc import Mapping


def start_child(code: str, *arguments: object, **environment: str) -> "subprocess.Popen[str]":
    """Start ``code`` with ``sys.argv[1:] == arguments``; its standard streams are pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(environment),
    )


def run_child(code: str, *arguments: object, cwd: object = None, **environment: str) -> str:
    """What ``code`` prints. A child that fails fails the test, with its traceback."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=None if cwd is None else str(cwd),
        env=_environment(environment),
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"child ended with {done.returncode}:\n{done.stderr}"
    return done.stdout


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **extra}
