"""A model call on the wire: what a client may write on a connection, byte by byte."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httptools
import pytest
from tests.contract.gateway_room import HELLO, Room, gateway_room

BODY = {"model": "main", "messages": HELLO}
BOUND_S = 20.0


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with gateway_room(tmp_path_factory.mktemp("connection")) as room:
        yield room


class _Answers:
    """Answers as a client parses them off a connection, one after another."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._ready: list[tuple[int, dict[bytes, bytes], bytes]] = []
        self._parser = httptools.HttpResponseParser(self)
        self._new()

    def _new(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._body = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._ready.append((self._parser.get_status_code(), self._headers, self._body))
        self._new()

    def next(self) -> tuple[int, dict[bytes, bytes], bytes]:
        while not self._ready:
            data = self._connection.recv(65536)
            assert data, "the gateway closed the connection before it answered"
            self._parser.feed_data(data)
        return self._ready.pop(0)


def _connected(room: Room) -> socket.socket:
    host, port = room.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), BOUND_S)


def _request(room: Room, path: str, token: str, body: Any = BODY, *, version: str = "1.1", more: str = "") -> bytes:
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nhost: x\r\nauthorization: Bearer {token}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n{more}\r\n"
    )
    return head.encode() + raw


def _call(room: Room, **fields: Any) -> bytes:
    started = room.start()
    return _request(room, started.base_url("") + "/chat/completions", started.token, **fields)


def test_calls_follow_each_other_on_one_connection(room: Room) -> None:
    with _connected(room) as connection:
        answers = _Answers(connection)
        for _ in range(3):
            connection.sendall(_call(room))
            status, headers, body = answers.next()
            assert status == 200 and json.loads(body)["choices"] and b"x-leyden-call" in headers


@pytest.mark.parametrize("kind", ["call", "list"])
def test_pipelined_requests_are_answered_in_their_order(room: Room, kind: str) -> None:
    started = room.start()
    models = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {started.token}\r\n\r\n".encode()
    second = _call(room) if kind == "call" else models
    with _connected(room) as connection:
        connection.sendall(_call(room) + second + _call(room))
        answers = _Answers(connection)
        kinds = [json.loads(answers.next()[2])["object"] for _ in range(3)]
    assert kinds == ["chat.completion", "chat.completion" if kind == "call" else "list", "chat.completion"]


def test_a_request_that_comes_in_single_bytes_is_a_request(room: Room) -> None:
    with _connected(room) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in _call(room):
            connection.sendall(bytes([byte]))
        assert _Answers(connection).next()[0] == 200


def test_a_body_in_chunks_is_a_body(room: Room) -> None:
    started = room.start()
    raw = json.dumps(BODY).encode()
    head = (
        f"POST {started.base_url('')}/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {started.token}"
        "\r\ntransfer-encoding: chunked\r\n\r\n"
    ).encode()
    with _connected(room) as connection:
        connection.sendall(head + b"%x\r\n%b\r\n" % (10, raw[:10]))
        connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(raw) - 10, raw[10:]))
        assert _Answers(connection).next()[0] == 200


def test_who_expects_to_be_told_to_go_on_is_told(room: Room) -> None:
    request = _call(room, more="expect: 100-continue\r\n")
    head, _, body = request.partition(b"\r\n\r\n")
    with _connected(room) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert _Answers(connection).next()[0] == 200


@pytest.mark.parametrize("fields", [{"version": "1.0"}, {"more": "connection: close\r\n"}])
def test_a_connection_that_is_not_kept_is_closed_after_the_answer(room: Room, fields: dict[str, str]) -> None:
    with _connected(room) as connection:
        connection.sendall(_call(room, **fields))
        status, headers, _ = _Answers(connection).next()
        assert status == 200 and headers[b"connection"] == b"close" and connection.recv(1) == b""


def test_a_stream_is_sent_in_chunks_and_the_connection_goes_on(room: Room) -> None:
    with _connected(room) as connection:
        answers = _Answers(connection)
        connection.sendall(_call(room, body={**BODY, "stream": True}))
        status, headers, body = answers.next()
        assert (status, headers[b"transfer-encoding"]) == (200, b"chunked") and body.endswith(b"data: [DONE]\n\n")
        connection.sendall(_call(room))
        assert answers.next()[0] == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_whole(tmp_path: Path) -> None:
    tree = {"gateway": {"max_body_bytes": 1024}}
    with gateway_room(tmp_path, tree) as room, _connected(room) as connection:
        request = _call(room, body={**BODY, "user": "x" * 100_000})
        connection.sendall(request[:5000])
        status, _, body = _Answers(connection).next()
        assert status == 413 and b"max_body_bytes" in body


def test_an_unusual_spelling_of_a_path_is_a_model_call_too(room: Room) -> None:
    started = room.start()
    path = started.base_url("") + "/chat/%63ompletions?api-version=1"
    with _connected(room) as connection:
        connection.sendall(_request(room, path, started.token))
        assert _Answers(connection).next()[0] == 200
    assert len(room.calls(started)) == 1
