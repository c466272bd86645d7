"""A client's connection: plain requests are read by hand, all others by uvicorn and h11.

Agents send thousands of small requests with a length, and h11 costs more than all else in a round.
Anything else (chunks, upgrades, other versions, large bodies, odd bytes) makes the connection h11's
for good. Before anything is looked at, a request's head, and a small body, must come in time.
"""

import asyncio
import logging
import re
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
from starlette.types import Message
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0
"""The longest that a head, or a plain request, may take from its first byte to its last."""
BODY = "body"
"""Where the state of a request read by hand has its body, so that none need wait for it."""
_PLAIN_BYTES = 256 * 1024
_LINE = re.compile(rb"(GET|POST|PUT|DELETE) (/[!-~]*) HTTP/1\.1\r\n")
_HEADER = re.compile(rb"([0-9A-Za-z-]+): ?([!-~](?:[ -~]*[!-~])?)?\r\n")
_log = logging.getLogger(__name__)


def read_head(head: bytes) -> tuple[dict[str, Any], int] | None:
    """Scope and length of the body of a plain request; None for any other."""
    line = _LINE.match(head)
    if line is None:
        return None
    headers, place = [], line.end()
    while place < len(head) - 2:
        header = _HEADER.match(head, place)
        if header is None:
            return None
        headers.append((header[1].lower(), header[2] or b""))
        place = header.end()
    values = dict(headers)
    length = values.get(b"content-length", b"0")
    is_plain = (
        len(values) == len(headers)  # none stands twice
        and not values.keys() & {b"transfer-encoding", b"expect", b"upgrade"}
        and values.get(b"connection", b"keep-alive").lower() == b"keep-alive"
        and b"host" in values
        and length.isdigit()
        and len(length) < 8
    )
    if not is_plain:
        return None
    path, _, query = line[2].partition(b"?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "scheme": "http",
        "http_version": "1.1",
        "method": line[1].decode(),
        "root_path": "",
        "raw_path": path,
        "path": unquote(path.decode()),
        "query_string": query,
        "headers": headers,
        "state": {},
    }
    return scope, int(length)


class Connection(H11Protocol):
    """One connection; `http` of uvicorn's settings."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.received = bytearray()
        self.by_h11 = False
        self.answering: asyncio.Task[None] | None = None
        self.last_answer = False
        self.head_timer: asyncio.TimerHandle | None = None
        self.gone = asyncio.Event()
        self._watch(waiting=True)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch(waiting=False)
        self.gone.set()

    def _watch(self, *, waiting: bool) -> None:
        """Set the clock when a head is waited for, stop it when one has come."""
        if waiting and self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        elif not waiting and self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def data_received(self, data: bytes) -> None:
        if self.by_h11:
            super().data_received(data)
            self._watch(waiting=self.conn.their_state is h11.IDLE)
            return
        self._unset_keepalive_if_required()
        self.received += data
        if self.answering is None:
            self._next()
        elif len(self.received) > _PLAIN_BYTES:
            self.flow.pause_reading()

    def _next(self) -> None:
        """Answer the next request, if it is all there."""
        end = self.received.find(b"\r\n\r\n") + 4
        plain = read_head(bytes(self.received[:end])) if end >= 4 else None
        whole = len(self.received) + 1 if plain is None else end + plain[1]
        if (end >= 4 and plain is None) or whole > _PLAIN_BYTES:
            self._leave_to_h11()
        elif plain is None or len(self.received) < whole:
            self._watch(waiting=True)
        else:
            self._watch(waiting=False)
            body = bytes(self.received[end:whole])
            del self.received[:whole]
            place = {"client": self.client, "server": self.server}
            scope = {**plain[0], **place, "state": {BODY: body}}
            self.answering = self.loop.create_task(self._answer(scope, body))
            self.tasks.add(self.answering)
            self.answering.add_done_callback(self._answered)

    def _leave_to_h11(self) -> None:
        self.by_h11 = True
        self.data_received(bytes(self.received))
        self.received.clear()

    async def _answer(self, scope: dict[str, Any], body: bytes) -> None:
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        start: Message = {}
        content = b""

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal start, content
            if message["type"] == "http.response.start":
                start = message
                return
            content += message.get("body", b"")
            if not message.get("more_body"):
                self._write(start, content)

        try:
            await self.app(scope, receive, send)
        except Exception:
            _log.exception("a defect in the answer to %s", scope["path"])
            if not start:
                self._write({"status": 500, "headers": [(b"connection", b"close")]}, b"")

    def _write(self, start: Message, content: bytes) -> None:
        status, headers = start["status"], [*self.server_state.default_headers, *start["headers"]]
        if self.last_answer:
            headers.append((b"connection", b"close"))
        self.last_answer = (b"connection", b"close") in headers
        if status != 204 and b"content-length" not in dict(headers):
            headers.append((b"content-length", b"%d" % len(content)))
        lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
        lines += [b"%s: %s" % header for header in headers]
        self.transport.write(b"\r\n".join([*lines, b"", content]))

    def _answered(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.answering = None
        if self.last_answer:
            self.transport.close()
        if not self.transport.is_closing():
            self.on_response_complete()
            if self.received:
                self._unset_keepalive_if_required()
                self._next()

    def shutdown(self) -> None:
        if self.answering is None:
            super().shutdown()
        self.last_answer = True
