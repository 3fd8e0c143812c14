"""Digests of a policy's weights: one of every tensor, so that a difference can be named."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from artifacts.keys import key_of, sha256

_CHUNK = 1 << 20


def tensor_record(name: str, packed: tuple[str, np.ndarray]) -> dict[str, Any]:
    """A tensor's row of :data:`artifacts.schemas.TENSORS`.

    The norm is added up in one order whatever the number of threads, so it is as repeatable as
    the tensor's bytes.
    """
    dtype, array = packed
    flat = np.ascontiguousarray(array).reshape(-1)
    parts = (flat[i : i + _CHUNK] for i in range(0, len(flat), _CHUNK))
    squares = [float(np.square(part, dtype=np.float64).sum()) for part in parts]
    return {
        "name": name,
        "dtype": dtype,
        "shape": list(array.shape),
        "digest": sha256(flat.view(np.uint8).data) if array.size else sha256(b""),
        "norm": math.sqrt(math.fsum(squares)),
    }


def tensor_records(weights: Mapping[str, tuple[str, np.ndarray]]) -> list[dict[str, Any]]:
    """A record for each tensor, by name."""
    # Hashing and summing let go of the interpreter's lock, so threads share them out.
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda name: tensor_record(name, weights[name]), sorted(weights)))


def weights_digest(records: Sequence[Mapping[str, Any]]) -> str:
    """Digest over all tensors: of names, types, shapes and bytes, blind to their order."""
    fields = ("dtype", "shape", "digest")
    return key_of({record["name"]: [record[field] for field in fields] for record in records})
