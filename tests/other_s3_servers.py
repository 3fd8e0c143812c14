"""S3 servers that differ from the main one: moto, and one that ignores conditions on a put.

moto keeps to AWS's own words where they matter: it names the condition that a put failed. ``rclone
serve s3`` takes a put with ``If-None-Match`` and overwrites, as some gateways do.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from s3_server import S3Server, free_ports, keep_running, script


@contextlib.contextmanager
def running_moto(folder: Path) -> Iterator[S3Server]:
    """A server that keeps objects in memory, with an empty bucket; ended on leaving."""
    (port,) = free_ports(1)
    server = S3Server(f"http://127.0.0.1:{port}")
    with keep_running(server, folder, [script("moto_server"), "-H", "127.0.0.1", "-p", str(port)]):
        yield server


@contextlib.contextmanager
def running_rclone(folder: Path) -> Iterator[S3Server]:
    """A server that overwrites what it is asked to create, with an empty bucket."""
    (port,) = free_ports(1)
    server = S3Server(f"http://127.0.0.1:{port}")
    data = folder / "data"
    data.mkdir()
    command = [
        script("rclone"),
        "serve",
        "s3",
        "--config=",
        f"--addr=127.0.0.1:{port}",
        f"--auth-key={server.access_key},{server.secret_key}",
        str(data),
    ]
    with keep_running(server, folder, command):
        yield server
