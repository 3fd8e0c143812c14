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

from s3_server import S3Server, running_s3_server  # noqa: E402  (after the path)


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
