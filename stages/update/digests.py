"""Digests of a policy's weights: one of every tensor, so that a difference can be named."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from artifacts.keys import key_of, sha256

_CHUNK = 1 << 20


def tensor_record(
    name: str, packed: tuple[str, np.ndarray], norm: float | None = None
) -> dict[str, Any]:
    """A tensor's row of :data:`artifacts.schemas.TENSORS`. ``norm``: where it is known already."""
    dtype, array = packed
    flat = np.ascontiguousarray(array).reshape(-1)
    return {
        "name": name,
        "dtype": dtype,
        "shape": list(array.shape),
        "digest": sha256(flat.view(np.uint8).data) if array.size else sha256(b""),
        "norm": _norm(flat) if norm is None else norm,
    }


def _norm(values: np.ndarray) -> float:
    """Added up in one order whatever the number of threads: as repeatable as the bytes."""
    parts = (values[i : i + _CHUNK] for i in range(0, len(values), _CHUNK))
    return math.sqrt(math.fsum(float(np.square(p, dtype=np.float64).sum()) for p in parts))


def tensor_records(
    weights: Mapping[str, tuple[str, np.ndarray]], norms: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """A record for each tensor, by name. ``norms``: those that are known already."""
    # Hashing and summing let go of the interpreter's lock, so threads share them out.
    with ThreadPoolExecutor(4) as threads:
        return list(
            threads.map(
                lambda n: tensor_record(n, weights[n], (norms or {}).get(n)), sorted(weights)
            )
        )


def weights_digest(records: Sequence[Mapping[str, Any]]) -> str:
    """Digest over all tensors: of names, types, shapes and bytes, blind to their order."""
    fields = ("dtype", "shape", "digest")
    return key_of({record["name"]: [record[field] for field in fields] for record in records})
