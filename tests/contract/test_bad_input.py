"""Bad input of every kind that can meet a gateway, in every dialect: sizes, keys, ended and foreign attempts, header
injection, engines that reset, are down, or give too little. Faults that the fake engine plays are in
`test_dialect_faults`, clocks and tricks in paths in `test_gateway_access`."""

import http.client
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from tests.contract.gateway_room import HELLO, Room, gateway_room
from tests.contract.test_dialect_faults import BODIES, check_shape, post
from tests.contract.test_gateway_ledger import end

from leyden.base.errors import RequestRefused
from leyden.gateway.client_headers import limits_of
from leyden.gateway.dialects import BY_NAME
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.running import Started
from leyden.testing.scripted import Behaviour, Faults, Reply


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with gateway_room(tmp_path_factory.mktemp("bad")) as room:
        for name in BODIES:  # brings the probes
            assert post(room, room.start(), name).status == 200
        yield room


def path_of(started: Started, name: str) -> str:
    dialect = BY_NAME[name]
    return started.base_url("").replace("/openai/", f"/{dialect.family}/") + f"/{dialect.path}"


# Size


HUGE = 50_000_000


def send_huge(room: Room, path: str, key: str, *, chunked: bool) -> tuple[int, bytes]:
    """A body of 50 MB, as a client sends it that reads the answer when it has sent everything."""
    piece = b"x" * 1_000_000

    def pieces() -> Iterator[bytes]:
        yield b'{"model": "main", "messages": [{"role": "user", "content": "'
        for _ in range(HUGE // len(piece)):
            yield piece

    connection = http.client.HTTPConnection(room.url.removeprefix("http://"), timeout=60)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    if not chunked:
        headers["content-length"] = str(HUGE + 60)
    try:
        connection.request("POST", path, pieces(), headers, encode_chunked=chunked)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", [*BODIES, "count_tokens", "spans"])
def test_fifty_megabytes_are_refused_and_not_kept(room: Room, name: str, chunked: bool) -> None:
    started = room.start()
    if name == "count_tokens":
        path = path_of(started, "anthropic") + "/count_tokens"
    elif name == "spans":
        path = f"/api/rollouts/{started.rollout.id}/attempts/{started.attempt.id}/spans"
    else:
        path = path_of(started, name)
    process = psutil.Process()
    before = process.memory_info().rss
    status, raw = send_huge(room, path, started.token, chunked=chunked)
    assert status == 413, raw[:300]
    error = json.loads(raw)["error"]
    assert error["type"] == "request_too_large" and "max_body_bytes" in (error.get("hint") or error["message"])
    assert process.memory_info().rss - before < HUGE, "no more than the limit is ever held"
    assert room.calls(started) == []


# Keys and attempts


@pytest.mark.parametrize("name", BODIES)
def test_keys_and_attempts_that_do_not_fit_are_told_in_the_shape_of_the_dialect(room: Room, name: str) -> None:
    mine, other, ended = room.start(), room.start(), room.start()
    end(room, ended)
    body = BODIES[name]
    nobody = path_of(mine, name).replace(mine.rollout.id, "nobody")
    for path, key, status in (
        (path_of(mine, name), None, 401),
        (path_of(mine, name), "lk-unknown", 401),
        (path_of(mine, name), other.token, 403),
        (nobody, mine.token, 404),
        (path_of(ended, name), ended.token, 409),
    ):
        answer = room.request("POST", path, body, key=key)
        assert answer.status == status, answer.raw
        check_shape(name, answer)
        assert answer.headers[BY_NAME[name].id_header.decode()].startswith("req_")
        assert answer.headers.get("x-should-retry") == ("false" if status == 409 else None)
    assert room.calls(mine) == room.calls(other) == room.calls(ended) == []


def test_an_sdk_does_not_ask_again_for_an_attempt_that_has_ended(room: Room) -> None:
    ended = room.start()
    end(room, ended)
    refused = len([span for span in room.trace(ended).spans if span.name == "gateway_refusal"])
    with room.sdk(ended, max_retries=5) as sdk:
        try:
            sdk.chat.completions.create(model="main", messages=HELLO)
            raise AssertionError("it was answered")
        except openai.ConflictError as error:
            assert error.request_id is not None and error.request_id.startswith("req_")
            assert error.response.request.headers["x-stainless-retry-count"] == "0"
    assert refused == 0


# Headers


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("text", ["main\r\nset-cookie: x=1", "main\nx: y", "\x00", "\u00e9" * 300])
def test_nothing_that_a_body_says_becomes_a_header(room: Room, name: str, text: str) -> None:
    started = room.start()
    answer = post(room, started, name, model=text)
    assert answer.status == 404
    assert {header.lower() for header in answer.headers} <= {
        "content-type", "content-length", "date", "server", "connection", "x-request-id", "request-id"
    }  # fmt: skip
    check_shape(name, answer)


@pytest.mark.parametrize("value", ["a\r\nset-cookie: x=1", "a\x00b", "x" * 5000, "\u00e9", ""])
def test_limits_of_a_provider_are_passed_on_only_if_they_are_harmless(value: str) -> None:
    given = {"X-RateLimit-Remaining-Tokens": value, "x-ratelimit-limit-requests": "5", "set-cookie": "x=1", "x-y": "z"}
    assert limits_of(given) == [(b"x-ratelimit-limit-requests", b"5")]


@pytest.mark.parametrize("stream", [False, True])
def test_the_limits_that_a_provider_tells_reach_the_client(tmp_path: Path, stream: bool) -> None:
    told = (("x-ratelimit-remaining-requests", "99"), ("anthropic-ratelimit-tokens-limit", "7"), ("x-internal", "no"))
    with FakeEngine(Behaviour(faults=Faults(limits=told), format="openai")) as provider:
        price = {"usd_per_million": {"input": 1.0, "output": 1.0}}
        tree = {
            "providers": {"gpt": {"kind": "openai", "base_url": provider.url + "/v1", **price}},
            "policies": {"gpt": {"provider": "gpt", "model": "gpt-x", "engine": ""}, "main": {}},
        }
        with gateway_room(tmp_path, tree) as room:
            room.engine.behaviour.faults = Faults(limits=told)
            started = room.start()
            answer = room.chat(started, {"model": "gpt", "messages": HELLO, "stream": stream})
            assert answer.headers["x-ratelimit-remaining-requests"] == "99"
            assert answer.headers["anthropic-ratelimit-tokens-limit"] == "7" and "x-internal" not in answer.headers
            ours = room.chat(started, {"model": "main", "messages": HELLO, "stream": stream})
            assert not [name for name in ours.headers if "ratelimit" in name.lower()], "an engine has none"


# Engines


@contextmanager
def raw_engine(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that answers the gateway's listing and hands every other connection to `behave`, then resets it."""
    listener = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def serve() -> None:
        while not stopped.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                behave(connection)
                # Closing with unsent data thrown away is a reset, not an end.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stopped.set()
        listener.close()
        thread.join(10)


def read_request(connection: socket.socket) -> bytes:
    connection.settimeout(20)
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


FIRST = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"abc"},"text":"abc","finish_reason":null}]}\n\n'
STREAM_BEGUN = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"%x\r\n%b\r\n" % (len(FIRST), FIRST)
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_an_engine_that_resets_the_connection_is_recorded_and_told(tmp_path: Path, name: str, stream: bool) -> None:
    def behave(connection: socket.socket) -> None:
        asked = read_request(connection)
        if asked and stream:
            connection.sendall(STREAM_BEGUN)

    frozen: dict[str, Any] = {"trainable": False}
    with raw_engine(behave) as url, gateway_room(tmp_path, {"policies": {"main": {**frozen, "engine": url}}}) as room:
        started = room.start()
        answer = post(room, started, name, stream=stream)
        [call] = room.calls(started)
        assert call.status == "error" and call.error
        if stream:
            assert answer.status == 200 and b"[DONE]" not in answer.raw and b"message_stop" not in answer.raw
        else:
            assert answer.status == 502
            check_shape(name, answer)


def test_an_engine_that_is_down_is_waited_for_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from leyden.gateway import upstream

    monkeypatch.setattr(upstream, "CONNECT_PATIENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    policy = {"trainable": False, "engine": f"http://127.0.0.1:{port}"}
    with gateway_room(tmp_path, {"policies": {"main": policy}, "gateway": {"probe_at_start": False}}) as room:
        started = room.start()
        answer = room.chat(started, {"model": "main", "messages": HELLO})
        assert (answer.status, answer.error["type"]) == (502, "engine_unreachable")
        assert f"127.0.0.1:{port}" in answer.error["message"] and "refuses connections" in answer.error["message"]
        [call] = room.calls(started)
        assert (call.status, call.http_status) == ("error", 502)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["openai_chat", "openai_completions"])
def test_fewer_choices_than_asked_are_no_answer(room: Room, name: str, stream: bool) -> None:
    room.engine.behaviour.faults = Faults(extra_choices=-1)
    room.engine.behaviour.reply = lambda body: Reply(text="a longer answer")
    started = room.start()
    try:
        answer = post(room, started, name, n=3, stream=stream)
    finally:
        room.engine.behaviour.faults = Faults()
    [call] = room.calls(started)
    assert call.status == "error" and len(call.choices) == 2, "what was sampled is recorded, trained never"
    if stream:
        assert b"[DONE]" not in answer.raw and b'"error"' in answer.raw
    else:
        assert answer.status == 502 and "gave 2 choices, 3 were asked for" in answer.error["message"]


def test_a_refusal_without_a_dialect_of_its_own_is_still_one(room: Room) -> None:
    answer = room.request("POST", "/v1/embeddings", {"model": "main"}, key=room.start().token)
    assert answer.status == 404 and answer.error["message"]
    assert RequestRefused("x").status == 400
