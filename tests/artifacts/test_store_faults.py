"""Writes that fail half way: what was there stays, and what was not there does not appear."""

import errno
import os
import signal
from pathlib import Path

import pytest

from artifacts.store import Store
from child import run_child, start_child
from s3_server import BUCKET, S3Server, line_cut_after

CALLS = ["put", "create"]

# The kernel stops a write at the limit, as a full disk would: what came before it is on disk.
LIMITED = """
import resource, signal, sys
from artifacts.store import Store
folder, call, path, action = sys.argv[1:]
signal.signal(signal.SIGXFSZ, getattr(signal, action))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    getattr(Store(folder), call)(path, b"2" * 1_000_000)
except OSError as error:
    print(error.errno)
"""

CUT = """
import sys
from artifacts.errors import StoreError
from artifacts.store import Store
url, call, path = sys.argv[1:]
try:
    getattr(Store(url), call)(path, b"2" * 4_000_000)
except StoreError as error:
    print(error)
"""


def files(folder: Path) -> dict[str, int]:
    """All files below ``folder``, hidden ones too, with their sizes."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_store_write_of_what_is_no_bytes_changes_nothing(store: Store) -> None:
    store.put("a/old", b"1")
    for call, path in [("put", "a/old"), ("put", "a/new"), ("create", "a/new")]:
        with pytest.raises(TypeError):
            getattr(store, call)(path, 3.14)
    assert store.names("a") == ["old"]
    assert store.read("a/old") == b"1"


@pytest.mark.parametrize("call", CALLS)
def test_local_write_on_full_disk_leaves_nothing(tmp_path: Path, call: str) -> None:
    output = run_child(LIMITED, tmp_path, call, "a/new", "SIG_IGN")
    assert int(output) == errno.EFBIG
    assert files(tmp_path) == {}
    getattr(Store(str(tmp_path)), call)("a/new", b"3")
    assert files(tmp_path) == {"a/new": 1}


def test_local_put_on_full_disk_keeps_the_earlier_file(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put("a/old", b"1")
    output = run_child(LIMITED, tmp_path, "put", "a/old", "SIG_IGN")
    assert int(output) == errno.EFBIG
    assert store.read("a/old") == b"1"
    assert files(tmp_path) == {"a/old": 1}


@pytest.mark.parametrize("call", CALLS)
def test_local_write_killed_half_way_leaves_nothing_under_its_name(
    tmp_path: Path, call: str
) -> None:
    store = Store(str(tmp_path))
    store.put("a/old", b"1")
    child = start_child(LIMITED, tmp_path, call, "a/new", "SIG_DFL")
    child.communicate()
    assert child.returncode == -signal.SIGXFSZ
    # The half file is there, under a name that no listing shows.
    assert 100_000 in files(tmp_path).values()
    assert store.names("a") == ["old"]
    assert not store.exists("a/new")
    getattr(store, call)("a/new", b"3")
    assert store.read("a/new") == b"3"


@pytest.mark.parametrize("failing", ["fsync", "link", "replace"])
def test_local_write_refused_by_the_disk_keeps_the_earlier_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    store = Store(str(tmp_path))
    store.put("a/old", b"1")

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, refuse)
        call = {"fsync": "put", "replace": "put", "link": "create"}[failing]
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            getattr(store, call)("a/new" if call == "create" else "a/old", b"2")
    assert store.read("a/old") == b"1"
    assert files(tmp_path) == {"a/old": 1}


def test_s3_write_cut_half_way_keeps_the_earlier_state(s3_server: S3Server, request) -> None:
    store = Store(f"s3://{BUCKET}/{request.node.name}")
    store.put("a/old", b"1")
    with line_cut_after(1_000_000, s3_server.endpoint) as line:
        environment = {"AWS_ENDPOINT_URL": line.endpoint, "AWS_MAX_ATTEMPTS": "1"}
        for number, (call, path) in enumerate([("put", "a/old"), ("create", "a/new")], start=1):
            output = run_child(CUT, store.url, call, path, **environment)
            assert output.startswith(f"can't write {store.url}/{path}: ")
            assert "Connect" in output
            assert line.num_cut >= number
    assert store.names("a") == ["old"]
    assert store.read("a/old") == b"1"
    store.create("a/new", b"3")
    assert store.read("a/new") == b"3"


def test_s3_endpoint_and_credentials_come_from_the_environment(
    s3_server: S3Server, request
) -> None:
    url = f"s3://{BUCKET}/{request.node.name}"
    write = "import sys; from artifacts.store import Store; Store(sys.argv[1]).put('x', b'1')"
    run_child(write, url)
    assert Store(url).read("x") == b"1"
    child = start_child(write, f"{url}-2", AWS_SECRET_ACCESS_KEY="not-the-right-one")
    _, errors = child.communicate()
    assert child.returncode != 0
    assert "not-the-right-one" not in errors
    assert s3_server.secret_key not in errors
    assert not Store(f"{url}-2").exists("x")


@pytest.mark.slow
def test_s3_create_in_parts_is_as_exclusive_as_in_one(s3_server: S3Server, request) -> None:
    store = Store(f"s3://{BUCKET}/{request.node.name}")
    first, second = (number * (101 << 20) for number in (b"1", b"2"))
    store.create("a/x", first)
    with pytest.raises(FileExistsError):
        store.create("a/x", second)
    assert store.read("a/x") == first
