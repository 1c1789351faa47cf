"""Who may do what: every role at every route; what keys, headers, paths and registered addresses cannot do."""

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from starlette.routing import Route
from tests.contract.gateway_room import HELLO, Room, gateway_room
from tests.contract.test_gateway_ledger import end, in_thread, until

from leyden.base.config import from_tree
from leyden.base.errors import RequestRefused
from leyden.base.records import LiveOrigin
from leyden.gateway import operations, routes, v1
from leyden.gateway.app import create_gateway
from leyden.gateway.dialects import DIALECTS
from leyden.gateway.egress import check_endpoint, why_not
from leyden.gateway.journal import JsonFormatter, TextFormatter
from leyden.store import open_store
from leyden.store.schema import calls
from leyden.testing.running import Started
from leyden.traces.reader import Reader

BODY = {"model": "main", "messages": HELLO}
ROLES = ("admin", "runner", "own", "foreign", "ended", "service", "revoked", "nobody")
FULL = {"admin": 0, "runner": 0, "own": 403, "foreign": 403, "ended": 403, "service": 403}
ONLY_ADMIN = {**FULL, "runner": 403}
OF_ATTEMPT = {"admin": 0, "runner": 0, "own": 0, "foreign": 403, "ended": 409, "service": 403}
BY_KEY = {"admin": 0, "runner": 0, "own": 0, "foreign": 0, "ended": 409, "service": 0}
KNOWN = {**BY_KEY, "ended": 0}
SCRAPE = {**FULL, "service": 0}
PUBLIC = dict.fromkeys(ROLES, 0)
ROLLOUT, ATTEMPT = "/api/rollouts/{rollout_id}", "/api/rollouts/{rollout_id}/attempts/{attempt_id}"
PROXY = "/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}"
SPAN = {"name": "x"}

ROUTES: dict[tuple[str, str], tuple[dict[str, int], Any]] = {
    ("GET", "/healthz"): (PUBLIC, None),
    ("GET", "/readyz"): ({**PUBLIC, "revoked": 401}, None),
    ("GET", "/metrics"): (SCRAPE, None),
    ("POST", "/api/rollouts"): (FULL, []),
    ("GET", "/api/rollouts"): (FULL, None),
    ("GET", "/api/rollouts/terminal"): (FULL, None),
    ("GET", ROLLOUT): (FULL, None),
    ("PATCH", ROLLOUT): (FULL, {}),
    ("DELETE", ROLLOUT): (FULL, None),
    ("POST", ROLLOUT + "/attempt/{attempt_id}/events"): (OF_ATTEMPT, {"event_type": "x"}),
    ("GET", ROLLOUT + "/events"): (FULL, None),
    ("GET", ROLLOUT + "/trace"): (FULL, None),
    ("POST", ATTEMPT + "/spans"): (OF_ATTEMPT, SPAN),
    ("POST", ATTEMPT + "/rewards"): (OF_ATTEMPT, {"name": "x", "value": 1.0}),
    ("POST", "/api/models"): (ONLY_ADMIN, []),
    ("GET", "/api/models"): (FULL, None),
    ("DELETE", "/api/models"): (ONLY_ADMIN, None),
    ("POST", "/api/models/drain"): (ONLY_ADMIN, {"endpoint": "http://127.0.0.1:1"}),
    ("POST", "/api/keys"): (ONLY_ADMIN, {"name": "again"}),
    ("GET", "/api/keys"): (ONLY_ADMIN, None),
    ("DELETE", "/api/keys/{key_id}"): (ONLY_ADMIN, None),
    ("GET", "/api/watch"): (FULL, None),
    ("GET", "/api/policies"): (FULL, None),
    ("GET", "/api/policies/{name}/versions"): (FULL, None),
    ("GET", "/api/steps"): (FULL, None),
    ("POST", "/proxy/pause"): (FULL, {}),
    ("POST", "/proxy/resume"): (FULL, {}),
    ("POST", "/proxy/drain"): (FULL, {}),
    ("GET", "/proxy/state"): (FULL, None),
    ("GET", "/v1/models"): (KNOWN, None),
    ("GET", "/openai/v1/models"): (KNOWN, None),
    ("GET", PROXY + "/v1/models"): ({**OF_ATTEMPT, "ended": 0}, None),
    ("GET", PROXY + "/openai/v1/models"): ({**OF_ATTEMPT, "ended": 0}, None),
    ("GET", "/anthropic/v1/models"): (KNOWN, None),
    ("GET", PROXY + "/anthropic/v1/models"): ({**OF_ATTEMPT, "ended": 0}, None),
    **{
        ("POST", f"{prefix}{family}/v1/messages/count_tokens"): (BY_KEY if prefix == "" else OF_ATTEMPT, BODY)
        for prefix in ("", PROXY.removesuffix("/mode/{mode}"), PROXY)
        for family in ("", "/anthropic")
    },
    ("GET", "/{path:path}"): (KNOWN, None),
}
"""What every role gets: 0 is no refusal of the key. `foreign` is another attempt than the path's."""
CALLS = {
    ("POST", "/v1/chat/completions"): (BY_KEY, BODY),
    ("POST", "/openai/v1/chat/completions"): (BY_KEY, BODY),
    ("POST", PROXY + "/openai/v1/chat/completions"): (OF_ATTEMPT, BODY),
    ("POST", "/v1/completions"): (BY_KEY, {"model": "main", "prompt": "x"}),
}


class Cast:
    """A room with somebody for every role."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.own, self.foreign, self.ended = room.start(), room.start(), room.start()
        end(room, self.ended)
        service = room.admin("POST", "/api/keys", {"name": "web"}).json
        revoked = room.admin("POST", "/api/keys", {"name": "old"}).json
        assert room.admin("DELETE", f"/api/keys/{revoked['key_id']}").status == 204
        self.keys: dict[str, str | None] = {
            "admin": room.gateway.admin_key, "runner": room.gateway.runner_key, "own": self.own.token,
            "foreign": self.foreign.token, "ended": self.ended.token, "service": service["key"],
            "revoked": revoked["key"], "nobody": None,
        }  # fmt: skip

    def path(self, template: str, role: str) -> str:
        of: Started = self.ended if role == "ended" else self.own
        path = template.replace("{rollout_id}", of.rollout.id).replace("{attempt_id}", of.attempt.id)
        path = path.replace("{mode}", "train").replace("{key_id}", "key_nobody").replace("{name}", "main")
        path = path.replace("{path:path}", "nowhere")
        return path + {"/api/rollouts": "?state_in=failed", "/api/watch": "?topic=runs&timeout_s=0"}.get(path, "")


@pytest.fixture(scope="module")
def cast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    tree = {"rewards": {"from_agent": True}, "gateway": {"probe_at_start": False}}
    with gateway_room(tmp_path_factory.mktemp("access"), tree) as room:
        yield Cast(room)


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    with gateway_room(tmp_path) as room:
        yield room


def test_the_table_has_every_route(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'leyden.db'}")
    gateway, _ = create_gateway(from_tree({}, base_dir=tmp_path), store)
    real = {
        (method, route.path)
        for part in (v1, operations, routes)
        for route in part.routes(gateway)
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
        if route.path != "/{path:path}" or method == "GET"
    }
    store.close()
    assert real == set(ROUTES)
    assert {dialect.path for dialect in DIALECTS} >= {"chat/completions", "completions"}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("route", [*ROUTES, *CALLS], ids=lambda route: " ".join(route))
def test_a_role_may_do_what_the_table_says_and_nothing_else(cast: Cast, route: tuple[str, str], role: str) -> None:
    expected, body = (ROUTES | CALLS)[route]
    if route == ("DELETE", ROLLOUT) and expected.get(role) == 0:
        path = "/api/rollouts/nobody"
    else:
        path = cast.path(route[1], role)
    answer = cast.room.request(route[0], path, body, key=cast.keys[role])
    if route[1].startswith("/proxy/") and not expected.get(role, 401):
        cast.room.admin("POST", "/proxy/resume")
    refusal = expected.get(role, 401)
    if refusal:
        assert answer.status == refusal, answer.raw
        assert answer.error["message"] and answer.error["type"]
    else:
        assert answer.status not in (401, 403, 409) or answer.error["type"] == "conflict", answer.raw
        assert answer.status < 500


def test_a_service_key_calls_as_live_traffic_with_what_its_headers_say(room: Room) -> None:
    key = room.admin("POST", "/api/keys", {"name": "web"}).json["key"]
    headers = {"x_leyden_session": "s-1", "x_leyden_subject": "user 7", "x_leyden_purpose": "support"}
    answer = room.request("POST", "/v1/chat/completions", BODY, key=key, **headers)
    assert answer.status == 200
    call = Reader(room.store).call(answer.headers["x-leyden-call"])
    assert call.live == LiveOrigin(service="web", session="s-1", subject="user 7", purpose="support")
    assert call.attempt_id is None
    plain = room.request("POST", "/v1/chat/completions", BODY, key=room.gateway.admin_key)
    assert Reader(room.store).call(plain.headers["x-leyden-call"]).live == LiveOrigin(service="admin")
    assert room.store.read(lambda c: c.execute(select(calls.c.origin)).scalars().all()) == ["live", "live"]


@pytest.mark.parametrize("value", ["x" * 129, " ", "caf\u00e9"])
def test_a_header_that_cannot_be_recorded_is_refused_by_name(room: Room, value: str) -> None:
    answer = room.request("POST", "/v1/chat/completions", BODY, key=room.gateway.admin_key, x_leyden_session=value)
    assert answer.status == 400 and answer.error["field"] == "x-leyden-session"


def test_a_key_is_shown_once_stored_hashed_and_dead_when_it_is_revoked(room: Room, tmp_path: Path) -> None:
    made = room.admin("POST", "/api/keys", {"name": "web"}).json
    assert room.admin("POST", "/api/keys", {"name": "web"}).status == 409
    listed = room.admin("GET", "/api/keys").json
    assert [one["name"] for one in listed] == ["web"] and made["key"] not in json.dumps(listed)
    assert room.request("GET", "/v1/models", key=made["key"]).status == 200
    assert room.admin("DELETE", f"/api/keys/{made['key_id']}").status == 204
    assert room.admin("DELETE", f"/api/keys/{made['key_id']}").status == 204
    answer = room.request("GET", "/v1/models", key=made["key"])
    assert answer.status == 401 and "revoked" in answer.error["message"]
    assert room.admin("POST", "/api/keys", {"name": "web"}).status == 201, "its name is free again"
    assert room.admin("POST", "/api/keys", {"name": "a b"}).status == 422
    for path in tmp_path.glob("leyden.db*"):
        assert made["key"].encode() not in path.read_bytes()


def test_neither_keys_nor_bodies_reach_the_log(room: Room) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.extend(formatter.format(record) for formatter in (JsonFormatter(), TextFormatter()))

    keep = Keep()
    loggers = [logging.getLogger(name) for name in ("leyden", "uvicorn", "asyncio", "aiohttp")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(keep)
        logger.setLevel(logging.DEBUG)
    secret = "tell-nobody-4711"
    key = room.admin("POST", "/api/keys", {"name": "web"}).json["key"]
    started = room.start()
    try:
        body = {"model": "main", "messages": [{"role": "user", "content": secret}]}
        for stream in (False, True):
            room.chat(started, {**body, "stream": stream})
            room.request("POST", "/v1/chat/completions", {**body, "stream": stream}, key=key)
        room.chat(started, {**body, "tools": secret})
        room.chat(started, {**body, "model": secret})
        room.request("POST", "/v1/chat/completions", f'{{"{secret}'.encode(), key=started.token)
        room.request("POST", "/v1/chat/completions", body, key=secret)
        room.request("GET", f"/nowhere/{secret}", key=room.gateway.admin_key)
        from leyden.testing.scripted import Faults

        for faults in (Faults(status=500), Faults(no_json=True), Faults(drop=True)):
            room.engine.behaviour.faults = faults
            room.chat(started, body)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(keep)
            logger.setLevel(level)
    found = "\n".join(lines)
    for call in room.calls(started):
        assert call.id in found
    assert '"event": "refused"' in found
    for hidden in (secret, key, started.token, room.gateway.admin_key, room.gateway.runner_key):
        assert hidden not in found


def test_a_failure_of_ours_is_logged_with_its_stack_and_without_its_message() -> None:
    hidden = "tell-" + "nobody"
    try:
        raise ValueError(hidden)
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
        record = logging.LogRecord("leyden.gateway", logging.ERROR, "f", 1, "it failed", None, info)
    for formatter in (JsonFormatter(), TextFormatter()):
        line = formatter.format(record)
        assert "ValueError" in line and "test_gateway_access" in line and hidden not in line


# Where the gateway may be sent


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data", "http://[fe80::1]/", "http://[::ffff:169.254.169.254]/",
        "http://[fd00:ec2::254]/", "http://0.0.0.0:80", "http://8.8.8.8", "ftp://127.0.0.1/x", "file:///etc/passwd",
        "http://user:pw@127.0.0.1/", "http://127.0.0.1/?x=1", "http://127.0.0.1/#x", "http://", "http://127.0.0.1:99999",
        "http://2852039166/", "http://0xa9fea9fe/", "gopher://127.0.0.1", "http://no-such-host.invalid/",
    ],
)  # fmt: skip
def test_an_engine_cannot_be_registered_where_nobody_should_be_sent(room: Room, url: str) -> None:
    answer = room.admin("POST", "/api/models", [{"model": "m", "endpoint": url}])
    assert answer.status == 422, answer.raw
    assert room.admin("GET", "/api/models").json == []


async def test_hosts_are_allowed_by_name_or_network_and_metadata_never() -> None:
    await check_endpoint("http://127.0.0.1:8000/v1", ())
    await check_endpoint("http://[::1]:8000", ())
    await check_endpoint("http://10.1.2.3:8000", ("10.0.0.0/8",))
    await check_endpoint("http://8.8.8.8", ("8.8.8.0/24",))
    await check_endpoint("http://localhost:8000", ("local*",))
    for url, patterns in (
        ("http://127.0.0.1", ("10.0.0.0/8",)), ("http://169.254.169.254", ("*",)), ("http://8.8.8.8", ()),
    ):  # fmt: skip
        with pytest.raises(RequestRefused):
            await check_endpoint(url, patterns)


def test_a_name_is_judged_again_when_it_is_resolved() -> None:
    assert why_not("engine.local", "10.0.0.1", ()) is None
    assert why_not("engine.local", "169.254.169.254", ("*",)) is not None
    assert why_not("engine.local", "::ffff:169.254.0.1", ()) is not None
    assert why_not("engine.local", "203.0.113.5", ()) is not None
    assert why_not("engine.local", "203.0.113.5", ("engine.*",)) is None


def test_an_engine_cannot_redirect_the_gateway(room: Room) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        asked: list[bytes] = []
        over = threading.Event()

        def answer_redirects() -> None:
            server.settimeout(0.1)
            while not over.is_set():
                with suppress(TimeoutError):
                    connection, _ = server.accept()
                    with connection:
                        connection.settimeout(20)
                        asked.append(connection.recv(65536))
                        where = f"{room.engine.url}/v1/chat/completions".encode()
                        connection.sendall(b"HTTP/1.1 307 X\r\nlocation: " + where + b"\r\ncontent-length: 0\r\n\r\n")

        thread, _ = in_thread(answer_redirects)
        room.admin("POST", "/api/models", [{"model": "sly", "endpoint": url}])
        answer = room.request("POST", "/v1/chat/completions", {**BODY, "model": "sly"}, key=room.gateway.admin_key)
        over.set()
        thread.join(20)
        assert answer.status in (502, 307) or answer.status >= 400
        # What it lists, the probe, and the call, unless that met the closing connection of the probe.
        assert list(room.engine.requests) == [] and len(asked) >= 2


# Headers and paths


def test_nothing_that_is_registered_can_write_headers(room: Room) -> None:
    for name in ("a\r\nset-cookie: x=1", "a b", "\u00e9", ""):
        body = [{"model": name, "endpoint": room.engine.url}]
        assert room.admin("POST", "/api/models", body).status == 422


@pytest.mark.parametrize(
    "rollout",
    ["..", "%2e%2e", "..%2f..%2fapi", "x%00", "%0d%0aset-cookie:x", "'%20or%201=1--", "a" * 5000, "%ff%fe"],
)
def test_tricks_in_ids_find_nothing_and_break_nothing(room: Room, rollout: str) -> None:
    started = room.start()
    host, port = room.url.removeprefix("http://").split(":")
    raw = json.dumps(BODY).encode()
    for path in (
        f"/proxy/rollout/{rollout}/attempt/{started.attempt.id}/mode/train/openai/v1/chat/completions",
        f"/proxy/rollout/{started.rollout.id}/attempt/{rollout}/mode/train/openai/v1/chat/completions",
        f"/api/rollouts/{rollout}/attempts/{started.attempt.id}/spans",
    ):
        with socket.create_connection((host, int(port)), 20) as connection:
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {started.token}\r\nconnection: close\r\n"
                f"content-length: {len(raw)}\r\n\r\n".encode()
                + raw
            )
            head = read_all(connection).partition(b"\r\n\r\n")[0]
        assert head.split(b" ")[1] in (b"400", b"403", b"404"), head
        assert b"set-cookie" not in head.lower()
    assert room.calls(started) == []
    assert room.chat(started, BODY).status == 200


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(20)
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


# Clients and clocks that misbehave


def test_a_request_that_never_becomes_whole_is_cut_off(tmp_path: Path) -> None:
    with gateway_room(tmp_path, {"gateway": {"client_timeout_s": 0.3}}) as room:
        started = room.start()
        host, port = room.url.removeprefix("http://").split(":")
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {started.token}\r\n"
        for sent in (b"", b"POST /v1", head.encode(), head.encode() + b"content-length: 100\r\n\r\n{"):
            with socket.create_connection((host, int(port)), 20) as connection:
                connection.sendall(sent)
                assert b"408" in read_all(connection).partition(b"\r\n")[0]
        assert room.chat(started, BODY).status == 200
        assert len(room.calls(started)) == 1


def test_headers_without_end_are_cut_off(room: Room) -> None:
    host, port = room.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
        try:
            for number in range(200):
                connection.sendall(b"x-%d: %s\r\n" % (number, b"y" * 1000))
            head = read_all(connection)
        except (ConnectionResetError, BrokenPipeError):
            head = b"431"
        assert b"431" in head
    assert room.request("GET", "/healthz").status == 200


def test_a_client_that_takes_nothing_of_its_stream_is_let_go_and_its_call_recorded(tmp_path: Path) -> None:
    from leyden.testing.scripted import Reply

    tree = {"gateway": {"client_timeout_s": 0.3}, "policies": {"main": {"sampling": {"max_tokens": 30_000}}}}
    with gateway_room(tmp_path, tree) as room:
        started = room.start()
        room.engine.behaviour.reply = lambda body: Reply(text="x", num_tokens=30_000)
        host, port = room.url.removeprefix("http://").split(":")
        body = json.dumps({**BODY, "stream": True, "max_tokens": 30_000, "return_token_ids": True}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
                + started.token.encode() + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )  # fmt: skip
            until(lambda: any(call.status != "open" for call in room.calls(started)), "the record")
        [call] = room.calls(started)
        assert not call.delivered


def test_calls_outlive_jumps_of_the_clock(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    started = room.start(config={"timeout_seconds": 600})
    real = time.time
    for jump_s in (0.0, 86_400.0 * 365, -86_400.0 * 365):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real() + jump_s)
        assert room.chat(started, {**BODY, "user": str(jump_s)}).status == 200
    monkeypatch.undo()
    calls = room.calls(started)
    assert [call.seq for call in calls] == [0, 1, 2], "order is counted, not timed"
    assert all(call.status == "ok" and 0 <= call.latency_ms < 60_000 for call in calls)
