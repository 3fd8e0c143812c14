"""Who set about making a stage's output, and when: one small file for each attempt.

    iteration-000012/rollout/<key>/attempt-00002.json

Written before the work begins, so that a killed attempt leaves a trace too. For people alone:
outside every digest, and nothing is decided on it.
"""

import json
import os
import re
import socket
import time
from typing import Any

from artifacts.errors import AlreadyExistsError
from artifacts.store import Store

_NAME = re.compile(r"attempt-(\d{5})\.json")


def begin_attempt(store: Store, folder: str) -> int:
    """Record that this process sets about the work of ``folder``. Returns which attempt it is."""
    record = {"host": socket.gethostname(), "pid": os.getpid(), "start": time.time()}
    number = len(attempt_names(store, folder)) + 1
    while True:
        try:
            path = f"{folder}/attempt-{number:05d}.json"
            store.create(path, json.dumps(record, sort_keys=True).encode())
        except AlreadyExistsError:
            number += 1
        else:
            return number


def is_attempt(name: str) -> bool:
    """Whether ``name`` is that of an attempt's file."""
    return _NAME.fullmatch(name) is not None


def attempt_names(store: Store, folder: str) -> list[str]:
    """Names of the files of the attempts at ``folder``, in order."""
    return [name for name in store.names(folder) if is_attempt(name)]


def read_attempts(store: Store, folder: str) -> list[dict[str, Any]]:
    """Host, process id and start (Unix seconds) of each attempt, in order."""
    return [json.loads(store.read(f"{folder}/{n}")) for n in attempt_names(store, folder)]
