"""Stores on every backend, each empty and each a test's own."""

from uuid import uuid4

import pytest

from artifacts.store import Store
from s3_server import BUCKET


def _url(backend: str, request: pytest.FixtureRequest) -> str:
    if backend == "file":
        return str(request.getfixturevalue("tmp_path") / "run")
    if backend == "memory":
        return f"memory://{uuid4().hex}/run"
    request.getfixturevalue({"s3": "s3_server", "moto": "moto"}[backend])
    return f"s3://{BUCKET}/{uuid4().hex}/run"


@pytest.fixture(params=["file", "memory", "s3", "moto"])
def store(request: pytest.FixtureRequest) -> Store:
    """An empty store on each backend."""
    return Store(_url(request.param, request))


@pytest.fixture(params=["file", "s3", "moto"])
def shared_store(request: pytest.FixtureRequest) -> Store:
    """An empty store on each backend that other processes see."""
    return Store(_url(request.param, request))
