"""Bytes under names: one class over every fsspec file system.

Every write is whole or absent. A local file is written beside its name, synced, and renamed or
hard-linked into place; an object is one put. A handle that an exception could commit half-written
is never opened. No answer comes from a cached listing.
"""

import contextlib
import functools
import mmap
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from artifacts.door import explaining
from artifacts.errors import AlreadyExistsError, UrlError
from artifacts.secrets import holds_credentials

# Which extra of ours brings the file system of a URL.
_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
}
_PART = re.compile(r"[^/\\\x00-\x1f\x7f]+")
# S3 answers 409 where two conditional puts of one name meet: asked again, one of them has won.
_CONFLICT_WAITS = (0.05, 0.2, 0.8, 2.0)

# The memory file system looks first and writes after: exclusive in one thread only.
_ONE_AT_A_TIME = threading.Lock()


def filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of ``url`` and the path in it: the one place where either is made.

    Raises:
        UrlError: the URL holds credentials, or nothing here can open it.
    """
    if holds_credentials(url):
        raise UrlError(
            "a URL holds a password, a key or a signature, which would be written into records: "
            "leave it out, and give credentials by the environment or the cloud's own files"
        )
    protocol = url.split("://", 1)[0] if "://" in url else "file"
    extra = _EXTRAS.get(protocol)
    # A cached listing hides what other processes wrote, for reads by name too.
    options: dict[str, Any] = {"use_listings_cache": False} if extra else {}
    try:
        fs, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        remedy = f"pip install 'ratchet-rl[{extra}]'" if extra else str(error)
        raise UrlError(f"{url} needs a package that is not installed: {remedy}") from error
    except ValueError as error:
        raise UrlError(f"{url} is no URL of a file system: {error}") from error
    return fs, path.rstrip("/")


def is_name(part: object) -> bool:
    """Whether ``part`` names something directly in a folder, and nothing anywhere else."""
    return isinstance(part, str) and bool(_PART.fullmatch(part)) and part not in (".", "..")


def is_inside(path: object) -> bool:
    """Whether ``path`` stays in the folder that it is relative to, on every backend."""
    return isinstance(path, str) and "://" not in path and all(map(is_name, path.split("/")))


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Call = Callable[Concatenate["Store", str, _Arguments], _Result]


def _operation(name: str) -> Callable[[_Call[_Arguments, _Result]], _Call[_Arguments, _Result]]:
    """What fails in the method leaves it as a StoreError that says ``name`` and the path."""

    def around(method: _Call[_Arguments, _Result]) -> _Call[_Arguments, _Result]:
        @functools.wraps(method)
        def call(
            store: "Store", path: str, *args: _Arguments.args, **kwargs: _Arguments.kwargs
        ) -> _Result:
            with explaining(name, f"{store.url}/{path}"):
                return method(store, path, *args, **kwargs)

        return call

    return around


class Store:
    """One run's folder. Paths are relative to it, with forward slashes.

    Cheap to make and to pickle: it travels to other processes as its URL.

    Attributes:
        guard: called before every commit; raises where this process may not commit in the run.
            It stays in the process that set it: others write files, and commit nothing.
    """

    def __init__(self, url: str) -> None:
        self.guard: Callable[[], None] = _let_pass
        self.url = url.rstrip("/")
        self.fs, self.root = filesystem(self.url)
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self._in_one_part = {"max_concurrency": 1} if "s3" in self.fs.protocol else {}
        if self.is_local and "://" not in self.url:
            self.url = self.root  # a relative path means another folder in another process

    def __reduce__(self) -> tuple[type["Store"], tuple[str]]:
        return Store, (self.url,)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def owner(self, folder: str) -> "Store":
        """The store of the run that ``folder`` was committed in: this one, or a parent's."""
        return self

    def locate(self, path: str) -> str:
        """Absolute path of ``path`` inside the file system. Refuses to leave the folder."""
        if not is_inside(path):
            raise ValueError(f"{path!r} is not a path inside {self.url}")
        return f"{self.root}/{path}"

    def view(self, path: str, is_large: bool = False) -> memoryview:
        """The same bytes to look at. Raises FileNotFoundError.

        Of a local file they are its own pages, which the kernel reads ahead while the first are
        digested: nothing is copied, and what is named here is never changed.
        """
        mapped = self._map(path) if self.is_local else None
        return memoryview(self.read(path, is_large)) if mapped is None else mapped

    @_operation("read")
    def _map(self, path: str) -> memoryview | None:
        """A local file's pages; None where it is not there, or has none."""
        try:
            with open(self.locate(path), "rb") as file:
                pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:  # an empty file can't be mapped
            return None
        pages.madvise(mmap.MADV_WILLNEED)
        return memoryview(pages)

    @_operation("read")
    def read(self, path: str, is_large: bool = False) -> bytes:
        """All bytes of ``path``. Raises FileNotFoundError.

        Args:
            is_large: fetch it in parts, side by side, where the file system can.
        """
        # In parts, s3fs asks for the size first: a round trip more for each small file.
        options = {} if is_large else self._in_one_part
        return bytes(self.fs.cat_file(self.locate(path), **options))

    @_operation("look for")
    def exists(self, path: str) -> bool:
        """Whether ``path`` is there, asked of the file system now."""
        return bool(self.fs.exists(self.locate(path)))

    @_operation("look for")
    def size(self, path: str) -> int | None:
        """Bytes of the file ``path``, or None where there is no file."""
        try:
            info = self.fs.info(self.locate(path))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    @_operation("write")
    def put(self, path: str, data: bytes) -> None:
        """Write ``path`` whole, over what stands there."""
        if self.is_local:
            where = self.locate(path)
            self._put_local(os.path.dirname(where), lambda: where, data, exclusive=False)
        else:
            self.fs.pipe_file(self.locate(path), data)

    @_operation("write")
    def put_named(self, folder: str, name: Callable[[], str], data: bytes) -> None:
        """Write a file of ``folder`` whole; locally ``name`` is asked once its bytes are synced."""
        if self.is_local:
            where = self.locate(folder)
            self._put_local(where, lambda: self.locate(f"{folder}/{name()}"), data, exclusive=False)
        else:
            self.put(f"{folder}/{name()}", data)

    @_operation("write")
    def create(self, path: str, data: bytes) -> None:
        """Write ``path`` whole, if nothing stands there.

        Raises:
            AlreadyExistsError: somebody was first; what they wrote is untouched.
        """
        where = self.locate(path)
        try:
            self._create(where, data)
        except OSError as error:
            if _is_lost_race(error):
                raise AlreadyExistsError(f"{self.url}/{path} exists already") from error
            raise

    def is_exclusive(self) -> bool:
        """Whether :meth:`create` refuses what stands there, found out by trying.

        Some S3 gateways ignore the condition and overwrite. Leaves nothing behind.
        """
        path = f".probe-{uuid.uuid4().hex}"
        self.create(path, b"first")
        try:
            self.create(path, b"second")
        except AlreadyExistsError:
            return True
        finally:
            self.remove(path)
        return False

    def _create(self, where: str, data: bytes) -> None:
        if self.is_local:
            self._put_local(os.path.dirname(where), lambda: where, data, exclusive=True)
        elif isinstance(self.fs, MemoryFileSystem):
            with _ONE_AT_A_TIME:
                self.fs.pipe_file(where, data, mode="create")
        else:
            for wait in (*_CONFLICT_WAITS, None):
                try:
                    self.fs.pipe_file(where, data, mode="create")
                    break
                except OSError as error:
                    if _http_status(error) != 409 or wait is None:
                        raise
                time.sleep(wait)

    @_operation("remove")
    def remove(self, path: str) -> None:
        """Delete ``path``; afterwards it is gone, also where it was not there before."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.locate(path))

    @_operation("list")
    def names(self, path: str) -> list[str]:
        """Sorted names of what lies directly in folder ``path`` ("" is the run's own)."""
        where = self.locate(path) if path else self.root
        try:
            found = self.fs.ls(where, detail=False)
        except FileNotFoundError:
            return []
        names = (str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in found)
        # A bucket may hold what no run wrote, under names that would lead elsewhere.
        return sorted(n for n in names if is_name(n) and not n.startswith(".tmp-"))

    @_operation("list")
    def sizes(self, path: str) -> dict[str, int]:
        """Bytes of every file below folder ``path``, by its path from there: one fresh listing.

        Locally it may miss what moves meanwhile: that a file is absent, :meth:`size` knows.
        """
        where = self.locate(path)
        found = self.fs.find(where, detail=True)
        return {str(name)[len(where) + 1 :]: int(info["size"]) for name, info in found.items()}

    def _put_local(
        self, folder: str, where: Callable[[], str], data: bytes, exclusive: bool
    ) -> None:
        os.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/.tmp-{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # A link is exclusive and appears whole; O_EXCL alone would show a half-written file.
            if exclusive:
                os.link(temporary, where())
            else:
                os.replace(temporary, where())
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        _sync_folder(folder)


def _let_pass() -> None:
    """The guard of a store that nobody holds."""


def _is_lost_race(error: OSError) -> bool:
    # s3fs makes a FileExistsError of a refused conditional put only where the server sends the
    # optional Condition field, and EINVAL elsewhere: the HTTP status below it is certain.
    return isinstance(error, FileExistsError) or _http_status(error) == 412


def _http_status(error: OSError) -> int | None:
    response = getattr(error.__cause__, "response", None) or {}
    status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def _sync_folder(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
