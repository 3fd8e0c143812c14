"""What a store asks of Google's and Azure's clients, where they are installed."""

from collections.abc import Iterator

import pytest

from artifacts.errors import AlreadyExistsError, StoreError
from artifacts.manifests import Manifest, read_manifest, write_manifest
from artifacts.store import Store
from small_clouds import environment_of, small_cloud

PACKAGES = {"gs": "gcsfs", "az": "adlfs"}
MANIFEST = Manifest("rollouts", "rollout", 1, "a" * 64, {"lr": 0.5}, {}, {}, ())


@pytest.fixture(params=PACKAGES)
def cloud(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Store, list[str]]]:
    """An empty store, and how each of its writes was asked for."""
    pytest.importorskip(PACKAGES[request.param])
    with small_cloud(request.param) as (url, conditions):
        for name, value in environment_of(request.param, url).items():
            monkeypatch.setenv(name, value)
        store = Store(f"{request.param}://box/run")
        type(store.fs).clear_instance_cache()
        yield Store(store.url), conditions
        type(store.fs).clear_instance_cache()


def test_cloud_keeps_the_contract_of_a_store(cloud: tuple[Store, list[str]]) -> None:
    store, _ = cloud
    assert not store.exists("a/x")
    assert store.names("") == []
    with pytest.raises(FileNotFoundError):
        store.read("a/x")
    store.put("a/x", b"long, long ago")
    store.put("a/x", b"now")
    store.put("a/deep/y", b"2" * 100_000)
    store.put("ab/z", b"3")
    assert store.read("a/x") == b"now"
    assert store.read("a/deep/y") == b"2" * 100_000
    assert (store.size("a/x"), store.size("a"), store.size("b")) == (3, None, None)
    assert store.names("a") == ["deep", "x"]
    assert store.names("") == ["a", "ab"]
    store.remove("a/x")
    store.remove("a/x")
    assert not store.exists("a/x")
    assert store.names("a") == ["deep"]


def test_cloud_sees_what_another_client_wrote_at_once(cloud: tuple[Store, list[str]]) -> None:
    store, _ = cloud
    assert store.names("a") == []
    assert not store.exists("a/x")
    other = Store(store.url)
    other.fs = type(store.fs)(use_listings_cache=False, skip_instance_cache=True)
    other.put("a/x", b"1")
    assert store.exists("a/x")
    assert store.names("a") == ["x"]
    other.put("a/x", b"longer")
    assert (store.size("a/x"), store.read("a/x")) == (6, b"longer")


def test_cloud_is_asked_to_create_exclusively(cloud: tuple[Store, list[str]]) -> None:
    store, conditions = cloud
    store.create("a/x", b"first")
    with pytest.raises(AlreadyExistsError):
        store.create("a/x", b"second")
    assert store.read("a/x") == b"first"
    store.put("a/x", b"third")
    assert conditions == ["exclusive", "exclusive", "any"]


def test_cloud_commits_a_manifest_once(cloud: tuple[Store, list[str]]) -> None:
    store, _ = cloud
    assert write_manifest(store, "a", MANIFEST) == MANIFEST
    assert write_manifest(store, "a", MANIFEST) == MANIFEST
    assert read_manifest(store, "a", MANIFEST.digest) == MANIFEST


@pytest.mark.slow  # the clients' own retries, which no setting of theirs shortens
def test_cloud_that_is_gone_is_an_error_with_operation_and_file(
    cloud: tuple[Store, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = cloud
    for name, value in environment_of(store.url[:2], "http://127.0.0.1:1").items():
        monkeypatch.setenv(name, value)
    type(store.fs).clear_instance_cache()
    with pytest.raises(StoreError, match=f"can't read {store.url}/a/x: "):
        Store(store.url).read("a/x")
