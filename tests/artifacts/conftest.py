"""Stores on every backend, each empty and each a test's own."""

import os
from collections.abc import Iterator
from uuid import uuid4

import pytest
from s3fs import S3FileSystem

from artifacts.store import Store
from s3_server import BUCKET, S3Server, running_s3_server


@pytest.fixture(scope="session")
def _session_s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server
    # fsspec keeps clients, and this one's server is gone.
    S3FileSystem.clear_instance_cache()


@pytest.fixture
def s3_server(_session_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A running S3 server, the one that this process and its children talk to."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in _session_s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return _session_s3_server


def _url(backend: str, request: pytest.FixtureRequest) -> str:
    if backend == "file":
        return str(request.getfixturevalue("tmp_path") / "run")
    if backend == "s3":
        request.getfixturevalue("s3_server")
    root = {"memory": "memory://", "s3": f"s3://{BUCKET}/"}[backend]
    return f"{root}{uuid4().hex}/run"


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest) -> Store:
    """An empty store on each backend."""
    return Store(_url(request.param, request))


@pytest.fixture(params=["file", "s3"])
def shared_store(request: pytest.FixtureRequest) -> Store:
    """An empty store on each backend that other processes see."""
    return Store(_url(request.param, request))
