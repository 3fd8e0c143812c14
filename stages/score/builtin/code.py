"""Whether a response's program passes its tests, run in the sandbox."""

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from stages.score.sandbox import Limits, Ran, check_isolation, run_bare, run_sandboxed

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

# The program runs first, the tests after it in the same namespace. What reports is read only then,
# from the end of standard input, and a program that ends the process early has passed nothing.
_HARNESS = """
import sys
_names = {{"__name__": "__main__"}}
exec(compile({program!r}, "program.py", "exec"), _names)
_passed = []
for _number, _test in enumerate({tests!r}):
    try:
        exec(compile(_test, f"test-{{_number}}.py", "exec"), _names)
    except Exception:
        continue
    _passed.append(_number)
print("\\n" + sys.stdin.read() + " ".join(map(str, _passed)), flush=True)
"""


def code_tests(
    text: str,
    ground_truth: str | None,
    partial: bool = False,
    seconds: float = 10.0,
    memory_mb: int = 512,
    isolation: str = "required",
    **row: object,
) -> float | None:
    """1.0 where the last ``` block of the response (else all of it) passes, else 0.0.

    ``ground_truth`` has the tests: Python text with assertions; a JSON list of such texts; or a
    JSON list of ``{"input": …, "output": …}``, what the program reads and is to print, compared
    without blanks at line ends. None where there are no tests.

    A program that tries to may lie to assertions, with which it shares a process; it can't to
    inputs and outputs.

    Args:
        partial: the share of tests passed, instead of all or nothing.
        seconds: wall time of a program, memory_mb: memory.
        isolation: ``none`` runs what a model wrote with all that this process may do.
    """
    tests = parsed_tests(ground_truth)
    if not tests:
        return None
    run = run_sandboxed if isolation == "required" else run_bare
    limits = Limits(seconds=seconds, memory_bytes=memory_mb << 20)
    blocks = _FENCE.findall(text)
    program = blocks[-1] if blocks else text
    if isinstance(tests[0], str):
        passed = _num_asserted(run, program, tests, limits)
    else:
        passed = sum(_prints(run, program, test, limits) for test in tests)
    return passed / len(tests) if partial else float(passed == len(tests))


def check_code_tests(
    partial: bool = False,
    seconds: float = 10.0,
    memory_mb: int = 512,
    isolation: str = "required",
) -> None:
    """Raise ValueError where options are wrong, or this machine can't isolate programs."""
    if isolation not in ("required", "none"):
        raise ValueError(f"reward code_tests: isolation is {isolation!r}: take required or none")
    if seconds <= 0 or memory_mb < 64:
        raise ValueError(
            f"reward code_tests: seconds {seconds}, memory_mb {memory_mb}: take seconds above 0 "
            "and 64 MB or more, which Python itself needs"
        )
    if isolation == "required":
        check_isolation()


def parsed_tests(ground_truth: str | None) -> list[Any]:
    """Tests of one kind: texts of assertions, or mappings with input and output.

    Raises:
        ValueError: they are mixed, or of no kind.
    """
    if ground_truth is None or not ground_truth.strip():
        return []
    try:
        tests = json.loads(ground_truth)
    except ValueError:
        return [ground_truth]
    if not isinstance(tests, list):
        return [ground_truth]
    is_text = all(isinstance(test, str) for test in tests)
    is_pair = all(isinstance(test, dict) and {"input", "output"} <= set(test) for test in tests)
    if not (is_text or is_pair):
        raise ValueError("tests are a list of texts, or of mappings with input and output")
    return tests


def _num_asserted(run: Any, program: str, tests: Sequence[str], limits: Limits) -> int:
    token = secrets.token_hex(16)
    harness = _HARNESS.format(program=program, tests=list(tests))
    ran: Ran = run(harness, f"{token} ", limits)
    for line in ran.stdout.splitlines():
        if line.startswith(f"{token} "):
            return len(line.split()) - 1
    return 0


def _prints(run: Any, program: str, test: dict[str, Any], limits: Limits) -> bool:
    ran: Ran = run(program, str(test["input"]), limits)
    return ran.is_ok and _lines(ran.stdout) == _lines(str(test["output"]))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
