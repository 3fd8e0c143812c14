"""A line to an HTTP server that fails as networks and servers do, request by request."""

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from s3fs import S3FileSystem

# How a request fails: an HTTP status to answer with, or one of these.
CUT_REQUEST = "the connection breaks half way through what is sent"
LOSE_REPLY = "the server does what was asked, and the connection breaks before it says so"
CUT_REPLY = "the connection breaks half way through the answer"
Fault = int | str | None

_CODES = {409: "ConditionalRequestConflict", 500: "InternalError", 503: "ServiceUnavailable"}
# Of one connection, not of the message.
_HOPS = {"connection", "keep-alive", "transfer-encoding", "expect"}


@dataclass
class FaultyLine:
    """A line to ``server``. ``fault(method, path)`` is asked at every request, in its order."""

    server: str
    endpoint: str = ""
    fault: Callable[[str, str], Fault] = lambda method, path: None
    requests: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_fault(self, method: str, path: str) -> Fault:
        """Count a request; returns how it fails, or None."""
        with self.lock:
            self.requests.append((method, path))
            return self.fault(method, path)


@contextlib.contextmanager
def faulty_line(server: str) -> Iterator[FaultyLine]:
    """A line to ``server``, an ``http://host:port``."""
    line = FaultyLine(server)
    handler = type("Handler", (_Handler,), {"line": line})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listener:
        line.endpoint = f"http://127.0.0.1:{listener.server_port}"
        thread = threading.Thread(target=listener.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield line
        finally:
            listener.shutdown()
            thread.join()


@contextlib.contextmanager
def s3_through(line: FaultyLine, attempts: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process's S3 clients talk through ``line``; each tries an operation ``attempts`` times.

    1 is for a trouble that lasts: the waits between attempts are the clients' own.
    """
    S3FileSystem.clear_instance_cache()
    with patch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", line.endpoint)
        patched.setenv("AWS_MAX_ATTEMPTS", str(attempts))
        patched.setattr(S3FileSystem, "retries", attempts)
        yield
    S3FileSystem.clear_instance_cache()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body in two small packets would wait for each other, 40 ms a request.
    disable_nagle_algorithm = True
    line: FaultyLine

    def log_message(self, format: str, *args: object) -> None:
        """Tests count requests themselves."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.line.next_fault(self.command, self.path)
        if isinstance(fault, int):
            return self._answer(fault, [], _error_body(fault))
        if fault == CUT_REQUEST:
            self._forward_half(body)
            self.close_connection = True
            return None
        status, headers, data = self._forward(body)
        if fault == LOSE_REPLY:
            self.close_connection = True
            return None
        return self._answer(status, headers, data, is_cut=fault == CUT_REPLY)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = self._connect()
        self._send_head(connection)
        connection.send(body)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        return response.status, response.getheaders(), data

    def _forward_half(self, body: bytes) -> None:
        connection = self._connect()
        self._send_head(connection)
        connection.send(body[: len(body) // 2])
        connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.line.server.removeprefix("http://"), timeout=30)

    def _send_head(self, connection: http.client.HTTPConnection) -> None:
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOPS:
                connection.putheader(name, value)  # the host too: it is signed
        connection.endheaders()

    def _answer(
        self, status: int, headers: list[tuple[str, str]], data: bytes, is_cut: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _HOPS | {"content-length"}:
                self.send_header(name, value)
        length = {n.lower(): v for n, v in headers}.get("content-length", str(len(data)))
        if status != 204:
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if is_cut else data)
        self.close_connection = self.close_connection or is_cut


def _error_body(status: int) -> bytes:
    code = _CODES[status]
    return f"<Error><Code>{code}</Code><Message>{code} by the line</Message></Error>".encode()
