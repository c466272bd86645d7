"""A small web server on 127.0.0.1 that misbehaves on demand, for the tests of downloads."""

import re
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Resource:
    """`drops` and `statuses` are used up, one entry per request, before the server behaves."""

    body: bytes
    etag: str | None = '"1"'
    last_modified: str | None = None
    ranges: bool = True
    checks_if_range: bool = True
    range_shift: int = 0
    """Bytes by which a partial answer begins elsewhere than asked."""
    drops: list[int] = field(default_factory=list)
    """Bytes of the body after which the connection is cut."""
    statuses: list[int] = field(default_factory=list)
    length: int | None = None
    """A false Content-Length."""
    chunked: bool = False
    block_seconds: float = 0.0
    """Pause after each 64 KiB."""


@dataclass(frozen=True)
class Request:
    path: str
    range: str | None
    if_range: str | None


class Loopback:
    def __init__(self) -> None:
        self.resources: dict[str, Resource] = {}
        self.requests: list[Request] = []
        self.sent = 0

    def __enter__(self) -> "Loopback":
        loopback = self

        class Handler(_Handler):
            owner = loopback

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/{name}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Loopback

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        asked, if_range = self.headers.get("Range"), self.headers.get("If-Range")
        self.owner.requests.append(Request(name, asked, if_range))
        resource = self.owner.resources.get(name)
        if resource is None:
            self.send_error(404)
            return
        if resource.statuses:
            self.send_error(resource.statuses.pop(0))
            return
        start, body = 0, resource.body
        current = resource.etag or resource.last_modified
        fresh = if_range is None or if_range == current or not resource.checks_if_range
        if asked and resource.ranges and fresh:
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) + resource.range_shift
            if start >= len(body):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        if resource.etag:
            self.send_header("ETag", resource.etag)
        if resource.last_modified:
            self.send_header("Last-Modified", resource.last_modified)
        if resource.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            length = len(body) - start if resource.length is None else resource.length
            self.send_header("Content-Length", str(length))
        self.end_headers()
        drop = resource.drops.pop(0) if resource.drops else None
        self._send(resource, body[start:][:drop])
        if drop is not None or resource.length is not None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif resource.chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _send(self, resource: Resource, data: bytes) -> None:
        try:
            for at in range(0, len(data), 1 << 16):
                block = data[at : at + (1 << 16)]
                if resource.chunked:
                    block = b"%x\r\n%b\r\n" % (len(block), block)
                self.wfile.write(block)
                self.owner.sent += len(block)
                if resource.block_seconds:
                    time.sleep(resource.block_seconds)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
