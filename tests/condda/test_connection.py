"""Connections: what is read by hand is what h11 reads, in pieces, in a row, or not at all."""

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.condda.server import connection
from tasks.condda.server.connection import _PLAIN_BYTES, read_head
from tasks.condda.server.serve import running
from tests.condda.small import DOMAIN, write_test

PARTS = st.sampled_from(
    [
        *("Host: a", "host: b", "Content-Length: 5", "Content-Length: 05", "Content-Length: -1"),
        *("Content-Length: 5, 5", "Transfer-Encoding: chunked", "Expect: 100-continue", "A: \x7f"),
        *("Connection: keep-alive", "Connection: close", "Upgrade: websocket", "X-Y:  z ", "X:"),
        *(" folded", "B :c", "é: x", "C: é", "D: a\tb", "E", ""),
    ]
)
LINES = st.sampled_from(
    [
        *("GET / HTTP/1.1", "POST /a?b=%20c HTTP/1.1", "GET /é HTTP/1.1", "GET  / HTTP/1.1"),
        *("HEAD / HTTP/1.1", "GET / HTTP/1.0", "get / HTTP/1.1", "GET a HTTP/1.1"),
        *("DELETE /% HTTP/1.1", "PUT /a HTTP/1.1"),
    ]
)


@settings(max_examples=400, deadline=None)
@given(LINES, st.lists(PARTS, max_size=4), st.sampled_from(["\r\n", "\n"]))
def test_heads_read_by_hand_are_read_alike(line: str, headers: list[str], end: str) -> None:
    head = (end.join([line, "Host: x", *headers]) + end + end).encode()
    plain = read_head(head) if head.endswith(b"\r\n\r\n") else None
    if plain is None:
        return
    scope, length = plain
    client = h11.Connection(h11.SERVER)
    client.receive_data(head)
    event = client.next_event()
    assert isinstance(event, h11.Request)
    assert scope["method"].encode() == event.method
    target = scope["raw_path"] + (b"?" + scope["query_string"]) * bool(scope["query_string"])
    assert target == event.target and scope["headers"] == list(event.headers)
    assert client.their_state is (h11.SEND_BODY if length else client.their_state)
    assert length == int(dict(event.headers).get(b"content-length", b"0"))


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    write_test(tmp_path / "data")
    with running(tmp_path / "data", tmp_path / "state") as url:
        yield url


def connected(url: str) -> socket.socket:
    place = urlsplit(url)
    return socket.create_connection((place.hostname, place.port), timeout=30)


def answers(client: socket.socket, count: int) -> list[bytes]:
    """Bodies of so many answers that have a length."""
    received, bodies = b"", []
    while len(bodies) < count:
        while b"\r\n\r\n" not in received:
            received += client.recv(65536)
        head, _, received = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n"), head
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(received) < length:
            received += client.recv(65536)
        bodies.append(received[:length])
        received = received[length:]
    return bodies


QUERY = f"protocol=OND&domain={DOMAIN}"
GET = f"GET /test/ids?{QUERY} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
FORM = (
    "GET /test/ids HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    "Content-Type: application/x-www-form-urlencoded\r\n"
    f"Content-Length: {len(QUERY)}\r\n\r\n{QUERY}"
).encode()
CHUNKED = (
    "GET /test/ids HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
    "Content-Type: application/x-www-form-urlencoded\r\n\r\n"
    f"{len(QUERY):x}\r\n{QUERY}\r\n0\r\n\r\n"
).encode()


def test_requests_in_a_row_in_pieces_and_of_both_kinds(url: str) -> None:
    with connected(url) as client:
        client.sendall(GET + FORM + GET)
        assert answers(client, 3) == [b"OND.1.1.1\n"] * 3
        for byte in FORM:
            client.sendall(bytes([byte]))
        assert answers(client, 1) == [b"OND.1.1.1\n"]
        client.sendall(GET + CHUNKED + GET)  # from here on h11 reads
        assert answers(client, 3) == [b"OND.1.1.1\n"] * 3
        client.sendall(FORM)
        assert answers(client, 1) == [b"OND.1.1.1\n"]


def test_a_long_head_is_read_too(url: str) -> None:
    long = GET.replace(b"?", b"?x=" + b"y" * _PLAIN_BYTES + b"&")
    with connected(url) as client:
        client.sendall(long)
        assert answers(client, 1) == [b"OND.1.1.1\n"]


@pytest.mark.parametrize(
    "start", [b"", GET[:20], FORM[:-3], CHUNKED + GET[:20], b"GET /\x00"], ids=lambda s: str(len(s))
)
def test_a_request_that_does_not_come_is_waited_for_no_longer(
    url: str, start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any token is looked at: the answer is the end of the connection."""
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    with connected(url) as client:
        client.sendall(start)
        received = b""
        while chunk := client.recv(65536):
            received += chunk
        assert received.count(b"HTTP/1.1 200") == start.startswith(CHUNKED)


def test_a_refused_host_ends_the_connection(url: str) -> None:
    with connected(url) as client:
        client.sendall(GET.replace(b"Host: 127.0.0.1", b"Host: elsewhere") + GET)
        received = b""
        while chunk := client.recv(65536):
            received += chunk
        assert received.startswith(b"HTTP/1.1 400") and received.count(b"HTTP/1.1") == 1
