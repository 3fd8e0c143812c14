"""Where MLflow keeps a run and the files of it, and one process at a time there."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from flows.plan import Plan


def tracking_uri(plan: Plan) -> str:
    """The configured URI, or an SQLite file beside the runs; in this folder if those are remote."""
    if plan.config.tracking.uri:
        return plan.config.tracking.uri
    store = plan.config.store
    folder = Path.cwd() if "://" in store else Path(store).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}"


def artifact_location(uri: str, store: str) -> str | None:
    """Where MLflow keeps files: beside the runs; a server knows its own place."""
    if uri.startswith(("http://", "https://")):
        return None
    base = store.rstrip("/") if "://" in store else str(Path(store).resolve())
    return f"{base}/mlartifacts"


def sqlite_path(uri: str) -> str | None:
    """The file that ``uri`` names; None where it is a server's."""
    path = uri.removeprefix("sqlite:///")
    return None if path == uri else path


@contextlib.contextmanager
def alone_at(uri: str) -> Iterator[None]:
    """One process at a time, where ``uri`` is an SQLite file: a client's making makes its tables.

    MLflow 3.17 itself lets several processes migrate a new file at once; most fail, and the file
    may stay broken ("duplicate column name", "_alembic_tmp_metrics already exists").
    """
    path = sqlite_path(uri)
    if path is None:
        yield
        return
    with open(f"{path}.lock", "w") as file:
        # Let go of when the file closes, by whatever end of the process too.
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
