"""How ranks meet: a process group over gloo on CPUs and NCCL on GPUs."""

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_PATIENCE = timedelta(minutes=30)


def listen(world: int) -> tuple[Any, tuple[str, int]]:
    """Open the store at which ``world`` ranks meet, on a free port: (store, (host, port))."""
    host = _own_address()
    store = dist.TCPStore(host, 0, world, is_master=True, wait_for_workers=False)
    return store, (host, store.port)


def join_group(
    rank: int, world: int, address: tuple[str, int], device: torch.device, meeting: Any
) -> None:
    """Make this process rank ``rank`` of ``world``.

    In a process that is a group of one already (an engine made it), that one serves.
    """
    if dist.is_initialized():
        if dist.get_world_size() != world:
            raise RuntimeError(f"this process is in a group of {dist.get_world_size()} already")
        return
    if address[0] == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = meeting or dist.TCPStore(*address, world, is_master=False)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_PATIENCE)


def _own_address() -> str:
    # All ranks are on this host until placement over several says otherwise.
    return os.environ.get("RATCHET_TRAINER_HOST") or socket.gethostbyname("localhost")
