"""The digest of a policy's weights: of every tensor, so that a difference can be named."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from artifacts.keys import key_of, sha256


def tensor_digest(name: str, packed: tuple[str, np.ndarray]) -> str:
    """Digest of one tensor's name, type, shape and bytes."""
    dtype, array = packed
    data = sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) if array.size else ""
    return key_of({"name": name, "dtype": dtype, "shape": list(array.shape), "data": data})


def weights_digest(weights: Mapping[str, tuple[str, np.ndarray]]) -> str:
    """Digest over all tensors, blind to their order."""
    # Hashing lets go of the interpreter's lock, so threads share it out.
    with ThreadPoolExecutor(4) as threads:
        digests = threads.map(lambda item: tensor_digest(*item), weights.items())
        return key_of(dict(zip(weights, digests, strict=True)))
