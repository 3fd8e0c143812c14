"""Phases of an update on one rank: how long each took, and the memory it held and needed.

On a GPU bytes are the allocator's, and the peak is the phase's own. On a CPU they are the process's
resident bytes, and the peak is the highest since the process began.
"""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from stages.update.trainer_spec import OutOfMemoryError


class Phases:
    """``with phases("read"):`` notes what the block took.

    Attributes:
        seconds: of each phase.
        memory: ``held_bytes`` at the end of each, and its ``peak_bytes``; ``start`` is before the
            first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, dict[str, int]] = {}
        self._mark("start")

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except torch.OutOfMemoryError as error:
            reason = str(error).partition("\n")[0]
            raise OutOfMemoryError(
                f"a trainer rank ran out of memory in phase {name}: set "
                "update.activation_checkpointing=true, lower update.max_tokens_per_rank, or take "
                f"more resources.update.ranks ({reason})"
            ) from error
        self.seconds[name] = time.perf_counter() - start
        self._mark(name)

    def _mark(self, name: str) -> None:
        if self._device.type == "cuda":
            held = torch.cuda.memory_allocated(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            held = psutil.Process().memory_info().rss
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts KiB
        self.memory[name] = {"held_bytes": held, "peak_bytes": max(held, peak)}


def total_memory(device: torch.device) -> int:
    """Bytes that the device has: a GPU's, or the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)
