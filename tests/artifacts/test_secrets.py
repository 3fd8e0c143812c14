"""Credentials: refused in URLs, and absent from whatever a store says."""

import errno
from pathlib import Path

import pytest

from artifacts.door import explaining
from artifacts.errors import StoreError, UrlError
from artifacts.secrets import holds_credentials, redacted
from artifacts.store import Store
from child import start_child
from s3_server import S3Server

PASSWORD = "hunter2/Xy+z=="

WITH = [
    f"s3://AKIA:{PASSWORD}@bucket/runs",
    f"simplecache::s3://AKIA:{PASSWORD}@bucket/runs",
    f"postgresql://me:{PASSWORD}@db.example/mlflow",
    "https://ghp_token@example.com/rows.jsonl",
    f"https://example.com/rows.jsonl?X-Amz-Signature={PASSWORD}&part=1",
    f"https://account.blob.core.windows.net/box/rows.jsonl?sv=2024&sig={PASSWORD}",
    f"az://box/rows.jsonl?account_key={PASSWORD}",
    f"http://user:{PASSWORD}@127.0.0.1:5000",
]
WITHOUT = [
    "runs/first",
    "/tmp/a:b@c/runs",
    "s3://bucket/a:b@c",
    "file:///a:b@c/runs",
    "http://127.0.0.1:5000/a:b@c",
    "abfs://container@account.dfs.core.windows.net/runs",
    "https://example.com/rows.jsonl?download=1",
    "sqlite:////tmp/mlflow.db",
    "ray://127.0.0.1:10001",
]


@pytest.mark.parametrize("url", WITH)
def test_url_with_credentials_is_refused_without_repeating_them(url: str) -> None:
    assert holds_credentials(url)
    with pytest.raises(UrlError, match="credentials by the environment") as caught:
        Store(url)
    assert "bucket" not in str(caught.value)
    for secret in (PASSWORD, "ghp_token"):
        assert secret not in redacted(f"Could not connect to {url!r}, sorry")


@pytest.mark.parametrize("url", WITHOUT)
def test_url_without_credentials_is_let_through_as_it_is(url: str) -> None:
    assert not holds_credentials(url)
    assert redacted(f"Could not connect to {url}") == f"Could not connect to {url}"


def test_redacted_hides_what_the_environment_keeps_secret_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secrets = {
        "AWS_SECRET_ACCESS_KEY": PASSWORD,
        "AWS_SESSION_TOKEN": "FwoGZXIvYXdzE",
        "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0LWtleQ",
        "WANDB_API_KEY": "0123456789abcdef",
    }
    places = {
        "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json",
        "AWS_SHARED_CREDENTIALS_FILE": "/home/me/.aws/credentials",
        "TOKENIZERS_PARALLELISM": "false",
        "EDITOR": "an-editor-of-mine",
    }
    for name, value in (secrets | places).items():
        monkeypatch.setenv(name, value)
    text = " ".join([*places.values(), *secrets.values()])
    assert redacted(text) == " ".join([*places.values(), *["***"] * len(secrets)])
    assert redacted("key=hunter2%2FXy%2Bz%3D%3D&x=1") == "key=***&x=1"


def fail_in_two_steps() -> None:
    try:
        raise KeyError(f"signed with {PASSWORD}")
    except KeyError as error:
        raise PermissionError(errno.EACCES, "Access Denied") from error


def test_error_with_a_secret_anywhere_in_its_chain_leaves_without_it_and_without_the_chain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PASSWORD)
    with pytest.raises(StoreError) as caught, explaining("read", "s3://b/x"):
        fail_in_two_steps()
    assert str(caught.value) == "can't read s3://b/x: PermissionError: [Errno 13] Access Denied"
    assert caught.value.errno == errno.EACCES
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_error_without_a_secret_keeps_its_cause() -> None:
    with pytest.raises(StoreError) as caught, explaining("write", "s3://b/x"):
        raise TimeoutError("no answer")
    assert isinstance(caught.value.__cause__, TimeoutError)


@pytest.mark.parametrize("error", [TypeError("not bytes"), ValueError("no path"), KeyError("x")])
def test_error_of_a_caller_passes_a_store_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explaining("write", "s3://b/x"):
        raise error
    assert caught.value is error


WRITER = """
import sys
from artifacts.store import Store
Store(sys.argv[1]).put("a/x", b"1")
"""


def test_traceback_of_an_endpoint_with_a_password_does_not_hold_it(
    s3_server: S3Server, tmp_path: Path
) -> None:
    child = start_child(
        WRITER,
        "s3://bucket/run",
        AWS_ENDPOINT_URL=f"http://me:{PASSWORD[:7]}@127.0.0.1:1",
        AWS_SECRET_ACCESS_KEY=PASSWORD,
        AWS_SESSION_TOKEN="FwoGZXIvYXdzE",
        AWS_MAX_ATTEMPTS="1",
    )
    printed = "".join(child.communicate())
    assert child.returncode == 1
    assert "StoreError: can't write s3://bucket/run/a/x: " in printed
    for secret in (PASSWORD, PASSWORD[:7], "FwoGZXIvYXdzE", s3_server.secret_key):
        assert secret not in printed
