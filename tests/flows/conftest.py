"""A folder to train in, one a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tiny_run import write_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What ``tiny_run.write_inputs`` writes, and the process in it."""
    made = tmp_path_factory.mktemp("tiny")
    write_inputs(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        yield made
