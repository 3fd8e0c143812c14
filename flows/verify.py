"""``ratchet verify``: whether what is committed is what it was."""

import json
import sys
from dataclasses import asdict

from artifacts.branches import open_store
from artifacts.runs import read_record
from artifacts.verification import verify
from flows.config import UserError


def print_verification(url: str, as_json: bool) -> None:
    """Verify the run at ``url`` and print what was found; exits 3 where something is wrong."""
    store = open_store(url)
    if read_record(store) is None:
        raise UserError(f"there is no run at {url!r}: give the folder or URL that holds run.json")
    found = verify(store)
    if as_json:
        print(json.dumps(asdict(found), indent=1))
    else:
        for problem in found.problems:
            print(problem)
        size = f"{found.manifests} manifests, {found.files} files, {found.bytes / 2**20:,.1f} MiB"
        size += f"; {found.retired} of the manifests retired by gc" if found.retired else ""
        print(f"{len(found.problems)} problems in {size}" if found.problems else f"whole: {size}")
    if found.problems:
        sys.exit(3)
