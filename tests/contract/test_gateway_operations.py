"""What whoever runs the gateway sees and sets: metrics, readiness, replicas, TLS, the probe at the start."""

import contextlib
import socket
import sqlite3
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.contract.gateway_room import HELLO, Answer, Room, gateway_room
from tests.contract.test_gateway_ledger import in_thread, until

from leyden.base.config import from_tree
from leyden.base.errors import ConfigError
from leyden.gateway import serve
from leyden.gateway.metrics import merged
from leyden.store import open_store
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.scripted import Behaviour, Faults

BODY = {"model": "main", "messages": HELLO}
QUICK = {"health_interval_s": 0.05, "eject_after": 2}


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    with gateway_room(tmp_path, {"gateway": QUICK}) as room:
        yield room


def metric(room: Room, name: str) -> dict[str, float]:
    """Series of one metric: labels to value."""
    page = room.request("GET", "/metrics", key=room.gateway.admin_key).raw.decode()
    lines = [line for line in page.splitlines() if line.startswith((name + "{", name + " "))]
    return {line.rpartition(" ")[0].removeprefix(name): float(line.rpartition(" ")[2]) for line in lines}


def test_metrics_count_calls_refusals_tokens_and_commits(room: Room) -> None:
    started = room.start()
    for stream in (False, True):
        room.chat(started, {**BODY, "stream": stream})
    room.chat(started, {**BODY, "n": 0})
    room.engine.behaviour.faults = Faults(status=500)
    room.chat(started, BODY)
    label = '{dialect="openai_chat",policy="main",status="%s"}'
    assert metric(room, "leyden_calls_total") == {label % "ok": 2.0, label % "error": 1.0}
    assert metric(room, "leyden_refused_total")['{kind="invalid_request_error"}'] == 1.0
    assert metric(room, "leyden_tokens_total")['{part="completion",policy="main"}'] == 6.0
    assert metric(room, "leyden_store_commit_seconds_count") == {"": 3.0}
    assert metric(room, "leyden_call_seconds_count") == {'{dialect="openai_chat"}': 3.0}
    assert metric(room, "leyden_in_flight") == {"": 0.0} == metric(room, "leyden_held")
    until(lambda: metric(room, "leyden_replica_up") == {f'{{endpoint="{room.engine.url}"}}': 1.0}, "the replica")


def test_metrics_show_what_is_held(room: Room) -> None:
    started = room.start()
    room.admin("POST", "/proxy/pause", {})
    thread, _ = in_thread(lambda: room.chat(started, BODY))
    until(lambda: metric(room, "leyden_held") == {"": 1.0}, "the call to wait")
    assert metric(room, "leyden_paused") == {"": 1.0}
    room.admin("POST", "/proxy/resume")
    thread.join(20)


def test_a_caller_cannot_make_series(room: Room) -> None:
    started = room.start()
    before = room.request("GET", "/metrics", key=room.gateway.admin_key).raw.count(b"\n")
    for number in range(20):
        room.chat(started, {**BODY, "model": f"model-{number}", "user": f"u{number}"})
    after = room.request("GET", "/metrics", key=room.gateway.admin_key).raw.count(b"\n")
    assert after - before <= 4


def test_pages_of_workers_are_merged_without_losing_a_series() -> None:
    page = '# HELP a_total A\n# TYPE a_total counter\na_total{x="1"} %d\n'
    text = merged({0: page % 2, 1: page % 3}).decode()
    assert 'a_total{worker="0",x="1"} 2.0' in text and 'a_total{worker="1",x="1"} 3.0' in text
    assert text.count("# TYPE a_total") == 1


# Readiness and replicas


def test_ready_says_whether_calls_can_be_answered_and_hides_addresses(room: Room) -> None:
    until(lambda: room.request("GET", "/readyz").status == 200, "the first check")
    assert room.request("GET", "/readyz").json == {"ready": True, "reasons": []}
    [replica] = room.admin("GET", "/readyz").json["replicas"]
    assert (replica["endpoint"], replica["state"]) == (room.engine.url, "up")


def test_not_ready_names_the_policy_whose_engine_is_away(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    with gateway_room(tmp_path, {"gateway": QUICK, "policies": {"main": {"engine": url}}}) as room:
        until(lambda: "ejected" in room.request("GET", "/readyz").raw.decode(), "the checks to fail")
        answer = room.request("GET", "/readyz")
        assert answer.status == 503 and "policy main" in answer.json["reasons"][0]
        assert url not in answer.raw.decode()


def test_not_ready_when_the_store_cannot_be_written(room: Room) -> None:
    until(lambda: room.request("GET", "/readyz").status == 200, "the first check")
    path = room.store.url.removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        answer = room.request("GET", "/readyz")
    assert answer.status == 503 and "store" in answer.json["reasons"][0]


def test_an_engine_that_cannot_return_tokens_is_known_before_the_first_call(tmp_path: Path) -> None:
    with FakeEngine(Behaviour(faults=Faults(missing=frozenset({"logprobs"})))) as engine:
        policies = {"main": {"engine": engine.url}, "other": {"engine": engine.url, "trainable": False}}
        with gateway_room(tmp_path, {"gateway": QUICK, "policies": policies}) as room:
            until(lambda: states(room).get(engine.url) == "incapable", "the probe")
            answer = room.admin("GET", "/readyz")
            assert answer.status == 503
            assert "flag logprobs" in answer.json["replicas"][0]["incapable"]
            assert list(engine.requests) == []


@contextlib.contextmanager
def two_replicas(tmp_path: Path) -> Iterator[tuple[Room, FakeEngine]]:
    with FakeEngine() as second, gateway_room(tmp_path, {"gateway": QUICK}) as room:
        models = [{"model": "main", "endpoint": engine.url, "version": 1} for engine in (room.engine, second)]
        assert room.admin("POST", "/api/models", models).status == 201
        yield room, second


def states(room: Room) -> dict[str, str]:
    return {one["endpoint"]: one["state"] for one in room.admin("GET", "/readyz").json["replicas"]}


def test_a_rollout_stays_with_its_replica_and_rollouts_are_spread(tmp_path: Path) -> None:
    with two_replicas(tmp_path) as (room, second):
        for _ in range(12):
            started = room.start()
            before = (len(room.engine.requests), len(second.requests))
            for _ in range(2):
                assert room.chat(started, BODY).status == 200
            grown = (len(room.engine.requests) - before[0], len(second.requests) - before[1])
            assert sorted(grown) == [0, 2]
        assert room.engine.requests and second.requests


def test_a_replica_that_fails_is_left_out_and_comes_back(tmp_path: Path) -> None:
    with two_replicas(tmp_path) as (room, second):
        until(lambda: set(states(room).values()) == {"up"}, "both to be up")
        second.behaviour.models_status = 503
        until(lambda: states(room)[second.url] == "ejected", "the second to be left out")
        second.requests.clear()
        for _ in range(8):
            assert room.chat(room.start(), BODY).status == 200
        assert list(second.requests) == []
        second.behaviour.models_status = 200
        until(lambda: states(room)[second.url] == "up", "the second to be back")
        for _ in range(12):
            assert room.chat(room.start(), BODY).status == 200
        assert second.requests


def test_a_call_does_not_wait_for_a_replica_that_is_gone_while_there_are_others(tmp_path: Path) -> None:
    with two_replicas(tmp_path) as (room, second):
        gone = second.url
        second.__exit__(None, None, None)
        for _ in range(12):
            started = room.start()
            answer = room.chat(started, BODY)
            if answer.status != 200:  # told at once; its retry finds the other
                assert answer.error["type"] in ("engine_error", "engine_unreachable")
                assert gone in answer.error["message"]
                answer = room.chat(started, BODY, x_stainless_retry_count="1")
            assert answer.status == 200


def test_a_replica_can_be_drained_and_let_in_again(tmp_path: Path) -> None:
    with two_replicas(tmp_path) as (room, second):
        until(lambda: set(states(room).values()) == {"up"}, "both to be up")
        asked = room.admin("POST", "/api/models/drain", {"endpoint": second.url + "/v1"})
        assert asked.json == {"draining": [second.url]}
        until(lambda: room.chat(room.start(), BODY).status == 200 and states(room)[second.url] == "draining", "it")
        second.requests.clear()
        for _ in range(8):
            room.chat(room.start(), BODY)
        assert list(second.requests) == []
        room.admin("POST", "/api/models/drain", {"endpoint": second.url, "draining": False})
        until(lambda: room.chat(room.start(), BODY).status == 200 and bool(second.requests), "calls to reach it again")
        assert room.admin("POST", "/api/models/drain", {"endpoint": "http://127.0.0.1:9"}).status == 404


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(authority, chain, key), made on the spot."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1", "localhost")
    paths = folder / "ca.pem", folder / "chain.pem", folder / "key.pem"
    authority.cert_pem.write_to_path(paths[0])
    paths[1].write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    made.private_key_pem.write_to_path(paths[2])
    return paths


def test_the_gateway_serves_tls_by_configuration(tmp_path: Path, certificate: tuple[Path, Path, Path]) -> None:
    authority, chain, key = certificate
    tree = {"gateway": {"tls_cert": str(chain), "tls_key": str(key)}}
    with gateway_room(tmp_path, tree) as room:
        assert room.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(authority))
        with urllib.request.urlopen(room.url + "/healthz", timeout=20, context=trusting) as response:
            assert Answer(response.status, {}, response.read()).json == {"status": "ok"}
        with pytest.raises(OSError, match=r"(?i)certificate"):
            urllib.request.urlopen(room.url + "/healthz", timeout=20)
        started = room.start()
        import openai

        with openai.OpenAI(
            base_url=started.base_url(room.url),
            api_key=started.token,
            http_client=openai.DefaultHttpxClient(verify=trusting),
        ) as sdk:
            answer = sdk.chat.completions.create(model="main", messages=HELLO)
        assert answer.choices[0].message.content == "ok"


@pytest.mark.parametrize("files", [{"tls_cert": "nowhere.pem", "tls_key": "nowhere.key"}, {"tls_cert": "leyden.toml"}])
def test_a_certificate_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path, files: dict[str, Any]) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'leyden.db'}")
    try:
        with pytest.raises(ConfigError, match=r"gateway\.tls_cert"):
            serve(from_tree({"gateway": files}, base_dir=tmp_path), store)
    finally:
        store.close()
