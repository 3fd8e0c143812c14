"""What really lies in a run's own folder, named by a manifest or not: for collection alone.

No reader finds data this way: readers follow manifests.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from artifacts.branches import BranchStore
from artifacts.store import Store

TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class Upload:
    """An object that was being written in parts, and is not there: on S3 its parts cost money.

    Attributes:
        path: the object's, in the run.
        bytes: of the parts that have come.
    """

    path: str
    upload_id: str
    bytes: int


def walk(store: Store) -> dict[str, int]:
    """Bytes of every file of the run by path, temporary ones too: one listing, no other run's."""
    top = f"{store.root}/"
    found = store.fs.find(store.root, detail=True)
    return {
        path.removeprefix(top): int(info["size"])
        for path, info in sorted(found.items())
        if path.startswith(top) and info["type"] == "file"
    }


def walk_inherited(store: Store) -> dict[str, int]:
    """Bytes of every file of the run's parents that is part of this run too."""
    if not isinstance(store, BranchStore):
        return {}
    above = walk_inherited(store.parent) | walk(store.parent)
    return {path: size for path, size in above.items() if store.is_inherited(path)}


def uploads(store: Store) -> Iterator[Upload]:
    """The run's unfinished multipart uploads; only S3 shows them."""
    if not _is_s3(store):
        return
    bucket, _, folder = store.root.partition("/")
    top = f"{folder}/"
    marker: dict[str, str] = {}
    while True:
        page = _ask(store, "list_multipart_uploads", Bucket=bucket, Prefix=top, **marker)
        for each in page.get("Uploads", []):
            if each["Key"].startswith(top):
                path = each["Key"].removeprefix(top)
                with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
                    num_bytes = _bytes_of(store, bucket, each["Key"], each["UploadId"])
                    yield Upload(path, each["UploadId"], num_bytes)
        # SeaweedFS names no next key, and can't go on: what is past its page is for the next time.
        if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
            return
        marker = {
            "KeyMarker": page["NextKeyMarker"],
            "UploadIdMarker": page["NextUploadIdMarker"],
        }


def abort(store: Store, upload: Upload) -> None:
    """Drop the parts of an unfinished upload; afterwards it is gone, also where it had ended."""
    bucket, _, key = store.locate(upload.path).partition("/")
    with contextlib.suppress(FileNotFoundError):
        _ask(store, "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload.upload_id)


def _bytes_of(store: Store, bucket: str, key: str, upload_id: str) -> int:
    total, marker = 0, 0
    while True:
        page = _ask(
            store,
            "list_parts",
            Bucket=bucket,
            Key=key,
            UploadId=upload_id,
            PartNumberMarker=marker,
        )
        total += sum(part["Size"] for part in page.get("Parts", []))
        if not page.get("IsTruncated"):
            return total
        marker = page["NextPartNumberMarker"]


def _ask(store: Store, method: str, **arguments: Any) -> dict[str, Any]:
    return dict(store.fs.call_s3(method, **arguments))


def _is_s3(store: Store) -> bool:
    protocol = store.fs.protocol
    return "s3" in ((protocol,) if isinstance(protocol, str) else protocol)
