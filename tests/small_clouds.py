"""The few requests of Google's and Azure's object stores that a run makes, answered from memory.

Written from the services' published protocols, to see what gcsfs and adlfs send for us. They show
that our calls mean what we think; that a real service does as it is told, only one can show.
"""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_DATE = "Tue, 01 Jan 2030 00:00:00 GMT"


class _Cloud(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects: dict[str, bytes]
    conditions: list[str]
    lock: threading.Lock

    def log_message(self, format: str, *args: object) -> None:
        """Nothing to say."""

    def serve(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        with self.lock:
            self.answer(parts.path, query, body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve

    def answer(self, path: str, query: dict[str, str], body: bytes) -> None:
        raise NotImplementedError

    def create(self, name: str, data: bytes, is_exclusive: bool, refusal: int) -> int | None:
        """Keep ``data`` under ``name``; the status of a refusal, or None."""
        self.conditions.append("exclusive" if is_exclusive else "any")
        if is_exclusive and name in self.objects:
            return refusal
        self.objects[name] = data
        return None

    def listed(self, prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
        """Names below ``prefix``: those directly there, and those of folders."""
        names, folders = [], set()
        for name in sorted(self.objects):
            if not name.startswith(prefix):
                continue
            head, found, _ = name[len(prefix) :].partition(delimiter or "\0")
            if found:
                folders.add(f"{prefix}{head}{delimiter}")
            else:
                names.append(name)
        return names, sorted(folders)

    def send(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class _Google(_Cloud):
    """JSON API, version 1."""

    def answer(self, path: str, query: dict[str, str], body: bytes) -> None:
        match = re.fullmatch(r"(?:/(upload|download))?/storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?", path)
        if match is None or path.endswith("/storageLayout"):
            return self.send(404)
        name = unquote(match[3] or "")
        if match[1] == "upload":
            return self._upload(query, body)
        if not name:
            return self._list(query)
        if name not in self.objects:
            return self.send(404, b"{}")
        if self.command == "DELETE":
            del self.objects[name]
            return self.send(204)
        if match[1] == "download" or query.get("alt") == "media":
            return self.send(200, self.objects[name])
        return self._json(self._record(name))

    def _upload(self, query: dict[str, str], body: bytes) -> None:
        # multipart/related: a JSON part, then the bytes.
        boundary = re.findall(r"boundary=['\"]?([^'\";]+)", self.headers["Content-Type"])[0]
        _, head, rest = body.split(f"--{boundary}".encode(), 2)
        name = json.loads(head.split(b"\n\n", 1)[-1].split(b"\r\n\r\n", 1)[-1])["name"]
        data = rest[: rest.rindex(f"--{boundary}--".encode())]
        data = re.split(rb"\r?\n\r?\n", data, maxsplit=1)[1]
        data = data.removesuffix(b"\n").removesuffix(b"\r")
        refused = self.create(name, data, query.get("ifGenerationMatch") == "0", 412)
        if refused:
            return self.send(refused, b'{"error": {"code": 412, "message": "conditionNotMet"}}')
        return self._json(self._record(name))

    def _list(self, query: dict[str, str]) -> None:
        names, folders = self.listed(query.get("prefix", ""), query.get("delimiter", ""))
        self._json({"items": [self._record(name) for name in names], "prefixes": folders})

    def _record(self, name: str) -> dict[str, Any]:
        size = str(len(self.objects[name]))
        times = {"updated": "2030-01-01T00:00:00Z", "timeCreated": "2030-01-01T00:00:00Z"}
        kind = {"contentType": "application/octet-stream", "generation": "1"}
        return (
            {"kind": "storage#object", "name": name, "bucket": "box", "size": size} | times | kind
        )

    def _json(self, value: Any) -> None:
        self.send(200, json.dumps(value).encode(), Content_Type="application/json")


class _Azure(_Cloud):
    """Blob service."""

    def answer(self, path: str, query: dict[str, str], body: bytes) -> None:
        name = unquote(path).removeprefix("/account/box").removeprefix("/")
        if query.get("restype") == "container":
            return self._list(query) if query.get("comp") == "list" else self.send(200)
        if self.command == "PUT":
            is_exclusive = self.headers.get("If-None-Match") == "*"
            refused = self.create(name, body, is_exclusive, 409)
            if refused:
                return self.send(refused, x_ms_error_code="BlobAlreadyExists")
            return self.send(201, ETag='"1"', Last_Modified=_DATE)
        if name not in self.objects:
            return self.send(404, x_ms_error_code="BlobNotFound")
        if self.command == "DELETE":
            del self.objects[name]
            return self.send(202)
        return self._get(self.objects[name])

    def _get(self, data: bytes) -> None:
        headers = {"ETag": '"1"', "Last_Modified": _DATE, "x_ms_blob_type": "BlockBlob"}
        if self.command == "HEAD":
            return self.send(200, Content_Length=str(len(data)), **headers)
        span = f"bytes 0-{len(data) - 1}/{len(data)}"
        return self.send(206, data, Content_Range=span, **headers)

    def _list(self, query: dict[str, str]) -> None:
        names, folders = self.listed(query.get("prefix", ""), query.get("delimiter", ""))
        blobs = [
            f"<Blob><Name>{escape(name)}</Name><Properties><Content-Length>"
            f"{len(self.objects[name])}</Content-Length><BlobType>BlockBlob</BlobType>"
            f"<Last-Modified>{_DATE}</Last-Modified><Etag>1</Etag></Properties></Blob>"
            for name in names
        ]
        prefixes = [f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in folders]
        text = (
            '<?xml version="1.0" encoding="utf-8"?><EnumerationResults ContainerName="box"><Blobs>'
            f"{''.join(blobs + prefixes)}</Blobs><NextMarker/></EnumerationResults>"
        )
        self.send(200, text.encode(), Content_Type="application/xml")


_CLOUDS = {"gs": _Google, "az": _Azure}


@contextlib.contextmanager
def small_cloud(protocol: str) -> Iterator[tuple[str, list[str]]]:
    """A service with the bucket or container ``box``: its URL, and how each write was asked for."""
    conditions: list[str] = []
    parts = {"objects": {}, "conditions": conditions, "lock": threading.Lock()}
    handler = type("Handler", (_CLOUDS[protocol],), parts)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_port}", conditions
        finally:
            listener.shutdown()
            thread.join()


def environment_of(protocol: str, url: str) -> dict[str, str]:
    """The variables by which the protocol's own client finds the service at ``url``."""
    if protocol == "gs":
        return {"STORAGE_EMULATOR_HOST": url, "GCSFS_DEFAULT_PROJECT": "tests"}
    key = "dGVzdHM="
    fields = {"DefaultEndpointsProtocol": "http", "AccountName": "account", "AccountKey": key}
    fields["BlobEndpoint"] = f"{url}/account"
    text = "".join(f"{name}={value};" for name, value in fields.items())
    return {"AZURE_STORAGE_CONNECTION_STRING": text}
