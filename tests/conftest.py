"""What every test process needs before any library is imported, and a real S3 server."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.environment import set_defaults

set_defaults()
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

from s3fs import S3FileSystem  # noqa: E402

from other_s3_servers import running_moto, running_rclone  # noqa: E402  (after the path)
from s3_server import S3Server, running_s3_server  # noqa: E402


@pytest.fixture(scope="session")
def _session_s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def _session_moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def s3_server(_session_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A running S3 server, the one that this process and its children talk to."""
    return _talk_to(_session_s3_server, monkeypatch)


@pytest.fixture
def moto(_session_moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The same from another maker, whose refusals read as AWS's own do."""
    return _talk_to(_session_moto, monkeypatch)


@pytest.fixture
def rclone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A running S3 server that honours no exclusive creation."""
    with running_rclone(tmp_path) as server:
        yield _talk_to(server, monkeypatch)


def _talk_to(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    # fsspec keeps clients, whichever server the environment named when they were made.
    S3FileSystem.clear_instance_cache()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server
