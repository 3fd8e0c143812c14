"""A judge of the tests' own behind a real HTTP port, that answers as a test says, well or not."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """What the server sends. ``seconds``: how long it thinks; ``hangs_up``: no answer at all."""

    body: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    hangs_up: bool = False


def verdict(text: str, tokens: tuple[int, int] | None = (7, 3), **options: Any) -> Reply:
    """A whole answer of a judge that wrote ``text``."""
    reason = options.pop("finish_reason", "stop")
    answer: dict[str, Any] = {
        "choices": [
            {"message": {"role": "assistant", "content": text}, "finish_reason": reason},
        ]
    }
    if tokens is not None:
        answer["usage"] = dict(zip(("prompt_tokens", "completion_tokens"), tokens, strict=True))
    return Reply(json.dumps(answer), **options)


class JudgeServer:
    """Answers ``POST /v1/chat/completions`` with ``answer(question, attempt)``.

    ``question`` is the last line of the message, ``attempt`` how often it was asked, from 1.

    Attributes:
        requests: bodies, in the order in which they came.
        keys: their headers ``Authorization``.
        most: how many there were at once.
    """

    def __init__(self, answer: Callable[[str, int], Reply]) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.asked: Counter[str] = Counter()
        self.most = self._now = 0
        self._lock = threading.Lock()
        self.url = ""

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        question = body["messages"][0]["content"].rpartition("\n")[2]
        with self._lock:
            self.requests.append(body)
            self.keys.append(handler.headers["Authorization"])
            self.asked[question] += 1
            attempt = self.asked[question]
            self._now += 1
            self.most = max(self.most, self._now)
        reply = self.answer(question, attempt)
        time.sleep(reply.seconds)
        with self._lock:
            self._now -= 1
        if reply.hangs_up or handler.path != "/v1/chat/completions":
            handler.close_connection = True
            return
        data = reply.body.encode()
        handler.send_response(reply.status)
        for name, value in {**reply.headers, "Content-Length": str(len(data))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)


@contextmanager
def judging(answer: Callable[[str, int], Reply]) -> Iterator[JudgeServer]:
    """A running server; its ``url`` is the base of the API."""
    judge = JudgeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            judge.serve(self)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

        def handle(self) -> None:
            try:
                super().handle()
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # a client that waited no longer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    judge.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
