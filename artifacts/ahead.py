"""What of a run is committed, read for many iterations at once.

The key of an iteration's work follows from the iteration before, so manifests that are read when
they are asked for are read one by one, at a round trip each. Those of a batch of iterations are
read here side by side, whatever their keys. Nothing is decided on it: what was not read ahead is
asked of the store.
"""

import contextlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from artifacts.manifests import FILE_NAME
from artifacts.runs import iteration_folder
from artifacts.store import Store

_READERS = 16


class ReadAhead(Store):
    """A store for reading, and the manifests and file sizes of ``iterations``, read on making it.

    One listing an iteration and one read a manifest.
    """

    def __init__(self, store: Store, iterations: Iterable[int]) -> None:
        super().__init__(store.url)
        self._store = store
        folders = [iteration_folder(iteration) for iteration in iterations]
        with ThreadPoolExecutor(_READERS) as pool:
            self._sizes = dict(zip(folders, pool.map(store.sizes, folders), strict=True))
            paths = [f"{f}/{name}" for f in folders for name in self._sizes[f]]
            paths = [path for path in paths if path.endswith(f"/{FILE_NAME}")]
            self._manifests = dict(zip(paths, pool.map(self._read, paths), strict=True))

    def read(self, path: str, is_large: bool = False) -> bytes:
        data = self._manifests.get(path)
        return self._store.read(path, is_large) if data is None else data

    def exists(self, path: str) -> bool:
        return self._store.exists(path)

    def size(self, path: str) -> int | None:
        return self._store.size(path)

    def names(self, path: str) -> list[str]:
        return self._store.names(path)

    def sizes(self, path: str) -> dict[str, int]:
        top, _, rest = path.partition("/")
        if top not in self._sizes:
            return self._store.sizes(path)
        return {
            name.removeprefix(f"{rest}/"): size
            for name, size in self._sizes[top].items()
            if name.startswith(f"{rest}/")
        }

    def _read(self, path: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            return self._store.read(path)
        return None
