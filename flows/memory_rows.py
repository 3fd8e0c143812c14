"""What a trainer rank needs of memory and has, for ``ratchet plan``: an estimate, and a remedy."""

import shutil
import subprocess
from dataclasses import replace

import psutil

from flows.config import Config
from stages.update.memory import GIB, MemoryEstimate, estimate_of, room_of_rank
from stages.update.trainer_spec import TrainerSpec

_MOST_RANKS = 1024


def memory_rows(config: Config, longest: int) -> list[tuple[str, str, str]]:
    """Rows of the plan: the estimate's parts, and whether it fits in what is here.

    Args:
        longest: tokens of the longest sample that can come.
    """
    ranks, wanted = config.resources.update.ranks, config.update.activation_checkpointing
    spec = TrainerSpec(config.model, config.update, "", 1.0, 0, "", longest)
    has = _room(config, ranks)
    found = estimate_of(spec, ranks, checkpoints=wanted is True)
    note = ""
    if wanted == "auto" and has is not None and found.total > has:
        found = estimate_of(spec, ranks, checkpoints=True)
        note = ", with activation checkpointing"
    rows = [("memory a trainer rank", f"{found.total / GIB:.1f} GiB", _parts(found) + note)]
    if has is not None:
        fits = found.total <= has
        remedy = "" if fits else f": {_remedy(spec, ranks, has)}"
        where = "a GPU's" if config.resources.update.gpus else "this machine's, shared by all ranks"
        rows.append(("it may use", f"{has / GIB:.1f} GiB", f"{where}{remedy}"))
    return rows


def _parts(found: MemoryEstimate) -> str:
    parts = {
        "weights and optimizer": found.state,
        "gathered": found.gathered,
        "activations": found.activations,
        "head": found.head,
    }
    return "estimate: " + ", ".join(f"{name} {size / GIB:.2g}" for name, size in parts.items())


def _remedy(spec: TrainerSpec, ranks: int, has: int) -> str:
    """The mildest change that makes it fit."""
    if estimate_of(spec, ranks, checkpoints=True).total <= has:
        return "too little; set update.activation_checkpointing=true"
    tokens = spec.config.max_tokens_per_rank
    while tokens > max(1, spec.longest // spec.config.sp):
        tokens //= 2
        config = spec.config.model_copy(update={"max_tokens_per_rank": tokens})
        if estimate_of(replace(spec, config=config), ranks, checkpoints=True).total <= has:
            return f"too little; set update.max_tokens_per_rank={tokens}"
    while (ranks := 2 * ranks) <= _MOST_RANKS:
        if estimate_of(spec, ranks, checkpoints=True).total <= has:
            return f"too little; on devices like it, take resources.update.ranks={ranks}"
    return "too little; take a larger update.sp, shorter samples, or a smaller model"


def _room(config: Config, ranks: int) -> int | None:
    """Bytes of one rank here; None where ranks go to GPUs and none can be asked."""
    gpus = config.resources.update.gpus
    if not gpus:
        return room_of_rank(psutil.virtual_memory().total, ranks, 0.0)
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, text=True, capture_output=True, check=False)
    sizes = [int(line) for line in answer.stdout.split() if line.isdecimal()]
    return room_of_rank(min(sizes) << 20, ranks, gpus) if sizes else None
