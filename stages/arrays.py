"""Weights on their way between processes: numpy arrays, with bfloat16 as its bits.

numpy has no bfloat16, and Ray moves numpy arrays through shared memory without a copy.
"""

import warnings
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

BFLOAT16 = "bfloat16"


def array_of(tensor: "torch.Tensor") -> tuple[str, np.ndarray]:
    """(dtype name, array) of a tensor on the CPU; shares its memory."""
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return BFLOAT16, tensor.view(torch.int16).numpy()
    return str(tensor.dtype).removeprefix("torch."), tensor.numpy()


def tensor_of(packed: tuple[str, np.ndarray]) -> "torch.Tensor":
    """The tensor that :func:`array_of` took apart; shares the array's memory. Not for writing."""
    import torch

    name, array = packed
    with warnings.catch_warnings():
        # Arrays from Ray are read-only, and readers of weights don't write.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if name == BFLOAT16 else tensor
