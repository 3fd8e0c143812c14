"""Bytes under names: one class over every fsspec file system.

Every write is whole or absent. A local file is written beside its name, synced, and renamed or
hard-linked into place; an object is one put. A handle that an exception could commit half-written
is never opened. No answer comes from a cached listing.
"""

import contextlib
import os
import uuid
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from artifacts.errors import AlreadyExistsError

# SeaweedFS's refusal of a conditional put carries no Condition field, so s3fs maps it on EINVAL.
_LOST_RACE = ("pre-condition", "precondition", "At least one of the pre")


def filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of ``url`` and the path in it: the one place where either is made."""
    options: dict[str, Any] = {}
    if url.split("://", 1)[0] in {"s3", "s3a", "gs", "gcs", "az", "abfs"}:
        # A cached listing hides what other processes wrote, for reads by name too.
        options["use_listings_cache"] = False
    fs, path = fsspec.core.url_to_fs(url, **options)
    return fs, path.rstrip("/")


class Store:
    """One run's folder. Paths are relative to it, with forward slashes.

    Cheap to make and to pickle: it travels to other processes as its URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.fs, self.root = filesystem(self.url)
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def __reduce__(self) -> tuple[type["Store"], tuple[str]]:
        return Store, (self.url,)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def locate(self, path: str) -> str:
        """Absolute path of ``path`` inside the file system. Refuses to leave the folder."""
        parts = path.split("/")
        if path.startswith("/") or "://" in path or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{path!r} is not a path inside {self.url}")
        return f"{self.root}/{path}"

    def read(self, path: str) -> bytes:
        """All bytes of ``path``. Raises FileNotFoundError."""
        return bytes(self.fs.cat_file(self.locate(path)))

    def exists(self, path: str) -> bool:
        """Whether ``path`` is there, asked of the file system now."""
        return bool(self.fs.exists(self.locate(path)))

    def size(self, path: str) -> int | None:
        """Bytes of ``path``, or None where there is nothing."""
        try:
            return int(self.fs.info(self.locate(path))["size"])
        except FileNotFoundError:
            return None

    def put(self, path: str, data: bytes) -> None:
        """Write ``path`` whole, over what stands there."""
        if self.is_local:
            self._put_local(self.locate(path), data, exclusive=False)
        else:
            self.fs.pipe_file(self.locate(path), data)

    def create(self, path: str, data: bytes) -> None:
        """Write ``path`` whole, if nothing stands there.

        Raises:
            AlreadyExistsError: somebody was first; what they wrote is untouched.
        """
        where = self.locate(path)
        try:
            if self.is_local:
                self._put_local(where, data, exclusive=True)
            else:
                self.fs.pipe_file(where, data, mode="create")
        except OSError as error:
            if isinstance(error, FileExistsError) or any(s in str(error) for s in _LOST_RACE):
                raise AlreadyExistsError(f"{self.url}/{path} exists already") from error
            raise

    def remove(self, path: str) -> None:
        """Delete ``path``. Raises FileNotFoundError."""
        self.fs.rm_file(self.locate(path))

    def names(self, path: str) -> list[str]:
        """Sorted names of what lies directly in folder ``path`` ("" is the run's own)."""
        where = self.locate(path) if path else self.root
        try:
            found = self.fs.ls(where, detail=False)
        except FileNotFoundError:
            return []
        names = (str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in found)
        return sorted(name for name in names if not name.startswith(".tmp-"))

    def _put_local(self, where: str, data: bytes, exclusive: bool) -> None:
        folder = os.path.dirname(where)
        os.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/.tmp-{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # A link is exclusive and appears whole; O_EXCL alone would show a half-written file.
            if exclusive:
                os.link(temporary, where)
            else:
                os.replace(temporary, where)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        _sync_folder(folder)


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
