"""Who may do what, which requests are refused and how, what is changed and said so, hold and drain, faults of
engines."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.gateway_room import HELLO, Room, gateway_room
from tests.contract.test_gateway_ledger import end, in_thread, until

from leyden.base.config import from_tree
from leyden.base.errors import ConfigError
from leyden.gateway import serve
from leyden.gateway.app import listen
from leyden.testing.scripted import Faults, Reply

BODY = {"model": "main", "messages": HELLO}


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    with gateway_room(tmp_path) as room:
        yield room


# Keys


def test_a_call_needs_a_key_that_is_known(room: Room) -> None:
    started = room.start()
    path = started.base_url("") + "/chat/completions"
    assert room.request("POST", path, BODY).status == 401
    assert room.request("POST", path, BODY, key="wrong").status == 401
    assert room.request("GET", "/api/rollouts?state_in=running").status == 401
    assert room.request("GET", "/healthz").json == {"status": "ok"}


def test_path_and_key_must_name_the_same_attempt(room: Room) -> None:
    mine, other = room.start(), room.start()
    answer = room.request("POST", other.base_url("") + "/chat/completions", BODY, key=mine.token)
    assert (answer.status, answer.error["type"]) == (403, "permission_error")
    assert room.calls(other) == []


def test_an_unknown_rollout_is_not_found_and_never_created(room: Room) -> None:
    started = room.start()
    path = "/proxy/rollout/nobody/attempt/0/mode/train/openai/v1/chat/completions"
    assert room.request("POST", path, BODY, key=started.token).status == 404
    assert room.admin("POST", path, BODY).status == 404
    assert room.admin("GET", "/api/rollouts/nobody").status == 404


def test_the_mode_of_the_path_must_be_that_of_the_rollout(room: Room) -> None:
    started = room.start()
    path = started.base_url("").replace("mode/train", "mode/val") + "/chat/completions"
    assert room.request("POST", path, BODY, key=started.token).status == 403


def test_an_attempt_key_can_neither_manage_nor_reward(room: Room) -> None:
    started = room.start()
    one = f"/api/rollouts/{started.rollout.id}"
    for method, path, body in (
        ("POST", "/proxy/pause", {}),
        ("DELETE", one, None),
        ("PATCH", one, {}),
        ("GET", one + "/trace", None),
        ("POST", "/api/models", []),
        ("GET", "/api/rollouts?state_in=running", None),
    ):
        assert room.request(method, path, body, key=started.token).status == 403, (method, path)
    rewards = f"{one}/attempts/{started.attempt.id}/rewards"
    answer = room.request("POST", rewards, {"name": "correct", "value": 1.0}, key=started.token)
    assert answer.status == 403 and "rewards.from_agent" in answer.error["hint"]
    event = {"event_type": "reward", "data": {"value": 1.0}}
    assert room.request("POST", f"{one}/attempt/{started.attempt.id}/events", event, key=started.token).status == 403
    assert room.trace(started).rewards == []


def test_an_attempt_may_reward_itself_where_the_configuration_says_so(tmp_path: Path) -> None:
    with gateway_room(tmp_path, {"rewards": {"from_agent": True}}) as room:
        started = room.start()
        path = f"/api/rollouts/{started.rollout.id}/attempt/{started.attempt.id}/events"
        event = {"event_type": "reward", "data": {"value": 0.25, "message": "fair"}}
        assert room.request("POST", path, event, key=started.token).status == 200
        [reward] = room.trace(started).rewards
        assert (reward.value, reward.source) == (0.25, "agent")


def test_an_attempt_can_add_spans_of_its_own_only(room: Room) -> None:
    mine, other = room.start(), room.start()

    def path(started: Any) -> str:
        return f"/api/rollouts/{started.rollout.id}/attempts/{started.attempt.id}/spans"

    span = {"name": "run_sql", "kind": "tool", "attributes": {"rows": 3}}
    assert room.request("POST", path(mine), span, key=mine.token).status == 201
    assert room.request("POST", path(other), span, key=mine.token).status == 403
    [recorded] = room.trace(mine).spans
    assert (recorded.name, recorded.kind, recorded.attributes) == ("run_sql", "tool", {"rows": 3})


def test_live_calls_by_the_administrator_are_recorded_without_an_attempt(room: Room) -> None:
    answer = room.admin("POST", "/v1/chat/completions", BODY)
    assert answer.status == 200
    origin = room.store.read(lambda c: c.exec_driver_sql("select origin, attempt_id from calls").one())
    assert tuple(origin) == ("live", None)


# Bad requests


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stop": [""]}, "stop"),
        ({"model": 7}, "model"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(room: Room, change: dict[str, Any], field: str) -> None:
    started = room.start()
    answer = room.chat(started, {**BODY, **change})
    assert answer.status == 400
    assert answer.error["field"] == answer.error["param"] == field
    assert answer.error["type"] == "invalid_request_error" and answer.error["message"] and answer.error["hint"]
    assert list(room.engine.requests) == []
    until(lambda: len(room.trace(started).spans) == 1, "the note")
    [span] = room.trace(started).spans
    assert span.name == "gateway_refusal" and span.attributes["field"] == field


def test_null_counts_as_absent_and_neutral_values_are_accepted(room: Room) -> None:
    body = {
        **BODY,
        "logit_bias": None,
        "presence_penalty": 0,
        "response_format": {"type": "text"},
        "tool_choice": "auto",
    }
    assert room.chat(room.start(), body).status == 200


@pytest.mark.parametrize(("raw", "status"), [(b"[1]", 422), (b'"x"', 422), (b"{", 400), (b"", 400)])
def test_a_body_that_is_no_object_is_refused(room: Room, raw: bytes, status: int) -> None:
    started = room.start()
    answer = room.request("POST", started.base_url("") + "/chat/completions", raw, key=started.token)
    assert answer.status == status and "object" in answer.error["hint"]


def test_a_body_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with gateway_room(tmp_path, {"gateway": {"max_body_bytes": 2000}}) as room:
        body = {"model": "main", "messages": [{"role": "user", "content": "x" * 3000}]}
        assert room.chat(room.start(), body).status == 413


def test_an_unknown_model_is_answered_with_the_names_that_are_known(room: Room) -> None:
    started = room.start()
    answer = room.chat(started, {**BODY, "model": "gpt-9"})
    assert answer.status == 404 and answer.error["hint"] == "known: main"


def test_a_wrong_path_is_noted_for_the_attempt_and_answered_with_a_hint(room: Room) -> None:
    started = room.start()
    for _ in range(30):
        answer = room.request("POST", "/v1/v1/chat/completions", BODY, key=started.token)
    assert answer.status == 404 and "OPENAI_BASE_URL" in answer.error["hint"]
    until(lambda: len(room.trace(started).spans) >= 20, "the notes")
    spans = room.trace(started).spans
    assert len(spans) == 20, "a loop of refused calls cannot fill the store"
    assert spans[0].attributes["path"] == "/v1/v1/chat/completions"


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b'"1"', b"true", b"null"])
def test_a_reward_that_is_no_finite_number_is_422(room: Room, value: bytes) -> None:
    started = room.start()
    one = f"/api/rollouts/{started.rollout.id}"
    for path, body in (
        (f"{one}/attempts/{started.attempt.id}/rewards", b'{"name": "correct", "value": ' + value + b"}"),
        (
            f"{one}/attempt/{started.attempt.id}/events",
            b'{"event_type": "reward", "data": {"value": ' + value + b"}}",
        ),
    ):
        assert room.admin("POST", path, body).status == 422
    assert room.trace(started).rewards == []


# Sampling


def test_the_policy_replaces_what_the_harness_asks_for_and_says_so(tmp_path: Path) -> None:
    policy = {
        "sampling": {"temperature": 0.7, "top_p": 1.0, "max_tokens": 50},
        "eval": {"max_tokens": 9, "temperature": 0.0},
    }
    with gateway_room(tmp_path, {"policies": {"main": policy}}) as room:
        started = room.start()
        answer = room.chat(started, {**BODY, "temperature": 0.2, "max_completion_tokens": 10, "seed": 5})
        assert answer.headers["x-leyden-rewrites"] == "temperature"
        assert answer.headers["x-leyden-policy"] == "main@0"
        sent = room.engine.requests[-1]
        assert (sent["temperature"], sent["max_tokens"], sent["seed"], sent["top_p"]) == (0.7, 10, 5, 1.0)
        [call] = room.calls(started)
        assert list(call.rewrites) == ["temperature"]
        assert call.sampling["temperature"] == 0.7
        room.chat(room.start(mode="val"), {**BODY, "max_tokens": 100})
        assert (room.engine.requests[-1]["temperature"], room.engine.requests[-1]["max_tokens"]) == (0.0, 9)
        room.chat(room.start(mode="val", sampling={"temperature": 0.5}), BODY)
        assert room.engine.requests[-1]["temperature"] == 0.5


def test_the_harness_is_respected_where_the_policy_says_so(tmp_path: Path) -> None:
    with gateway_room(tmp_path, {"policies": {"main": {"respect_harness": True}}}) as room:
        started = room.start()
        answer = room.chat(started, {**BODY, "temperature": 0.2, "top_p": 0.9, "max_tokens": 10, "seed": 1})
        assert answer.headers["x-leyden-rewrites"] == ""
        assert (room.engine.requests[-1]["temperature"], room.engine.requests[-1]["top_p"]) == (0.2, 0.9)


def test_seeds_follow_from_the_rollout_and_the_order_of_its_calls(room: Room) -> None:
    def seeds(seed: int) -> list[int]:
        started = room.start(seed=seed)
        for _ in range(2):
            room.chat(started, BODY)
        return [call.sampling["seed"] for call in room.calls(started)]

    first = seeds(1)
    assert seeds(1) == first and seeds(2) != first and first[0] != first[1]


# Hold and drain


def test_a_pause_holds_calls_until_resume(room: Room) -> None:
    started = room.start()
    assert room.admin("POST", "/proxy/pause", {"reason": "new weights", "retry_after_seconds": 3}).json["paused"]
    thread, answers = in_thread(lambda: room.chat(started, BODY))
    until(lambda: room.admin("GET", "/proxy/state").json["waiting"] == 1, "the call to wait")
    state = room.admin("GET", "/proxy/state").json
    assert state == {
        "paused": True,
        "retry_after_seconds": 3.0,
        "reason": "new weights",
        "inflight": 0,
        "waiting": 1,
    }
    assert room.engine.requests == type(room.engine.requests)() and not answers
    room.admin("POST", "/proxy/resume")
    thread.join(20)
    assert answers[0].status == 200


def test_the_wait_of_a_held_call_is_bounded_and_says_whom_it_waited_for(tmp_path: Path) -> None:
    with gateway_room(tmp_path, {"gateway": {"hold_timeout_s": 0.1}}) as room:
        room.admin("POST", "/proxy/pause", {"reason": "new weights"})
        answer = room.chat(room.start(), BODY)
        assert answer.status == 503 and answer.error["type"] == "hold_timeout"
        assert "new weights" in answer.error["message"] and "/proxy/resume" in answer.error["hint"]


def test_a_held_call_is_answered_by_the_version_that_serves_after_the_hold(room: Room) -> None:
    room.admin("POST", "/api/models", [{"model": "main", "endpoint": room.engine.url + "/v1", "version": 4}])
    started = room.start()
    assert room.chat(started, BODY).headers["x-leyden-policy"] == "main@4"
    room.admin("POST", "/proxy/pause", {})
    thread, answers = in_thread(lambda: room.chat(started, BODY))
    until(lambda: room.admin("GET", "/proxy/state").json["waiting"] == 1, "the call to wait")
    room.admin("POST", "/api/models", [{"model": "main", "endpoint": room.engine.url + "/v1", "version": 5}])
    room.admin("POST", "/proxy/resume")
    thread.join(20)
    assert answers[0].headers["x-leyden-policy"] == "main@5"
    assert room.engine.requests[-1]["model"] == "main@5"


def test_a_drain_waits_for_calls_in_flight(room: Room) -> None:
    started = room.start()
    room.chat(started, BODY)
    room.engine.behaviour.delay_s = 0.3
    thread, answers = in_thread(lambda: room.chat(started, BODY))
    until(lambda: room.admin("GET", "/proxy/state").json["inflight"] == 1, "the call")
    drained = room.admin("POST", "/proxy/drain", {"timeout_s": 20}).json
    assert (drained["drained"], drained["aborted"], drained["inflight"], drained["paused"]) == (
        True,
        0,
        0,
        True,
    )
    thread.join(20)
    assert answers[0].status == 200


def test_a_drain_stops_stragglers_and_records_what_came(room: Room) -> None:
    started = room.start()
    room.chat(started, BODY)
    room.engine.behaviour.chunk_delay_s = 0.05
    room.engine.behaviour.reply = lambda body: Reply(text="x" * 200)
    thread, answers = in_thread(lambda: room.chat(started, {**BODY, "stream": True}))
    until(lambda: len(room.engine.requests) == 2, "the engine to be asked")
    time.sleep(0.2)  # lets some chunks through; the test holds for any number of them
    drained = room.admin("POST", "/proxy/drain", {"timeout_s": 0.05}).json
    assert (drained["drained"], drained["aborted"]) == (True, 1)
    thread.join(20)
    assert b'"type":"aborted"' in answers[0].raw and b"[DONE]" not in answers[0].raw
    call = room.calls(started)[-1]
    assert call.status == "aborted" and call.num_sampled < 200
    until(lambda: room.engine.num_aborted == 1, "the engine to be left")


# Engines at fault


@pytest.mark.parametrize(
    ("faults", "status", "stored"),
    [
        (Faults(status=400), 400, "error"),
        (Faults(status=500), 502, "error"),
        (Faults(drop=True), 502, "error"),
        (Faults(no_json=True), 502, "error"),
        (Faults(cut_after_bytes=50), 502, "error"),
    ],
)
def test_a_fault_of_the_engine_is_recorded_and_answered_in_the_shape_of_the_dialect(
    room: Room, faults: Faults, status: int, stored: str
) -> None:
    started = room.start()
    room.chat(started, BODY)
    room.engine.behaviour.faults = faults
    answer = room.chat(started, BODY)
    assert answer.status == status and answer.error["message"]
    assert len(room.engine.requests) == 2, "a call that may have been sampled is not sent again"
    call = room.calls(started)[-1]
    assert (call.status, call.http_status) == (stored, status) and call.error


@pytest.mark.parametrize("faults", [Faults(error_in_stream=True), Faults(cut_after_bytes=2000), Faults(no_done=True)])
def test_a_stream_that_breaks_ends_in_a_typed_error_event(room: Room, faults: Faults) -> None:
    started = room.start()
    room.chat(started, BODY)
    room.engine.behaviour.faults = faults
    room.engine.behaviour.reply = lambda body: Reply(text="a longer answer")
    answer = room.chat(started, {**BODY, "stream": True})
    assert answer.raw.rstrip().splitlines()[-1].startswith(b'data: {"error":{')
    assert b"[DONE]" not in answer.raw
    call = room.calls(started)[-1]
    assert call.status == "error" and call.error


def test_a_busy_engine_is_asked_again(room: Room) -> None:
    started = room.start()
    room.chat(started, BODY)
    room.engine.behaviour.faults = Faults(status=503, fail_first=3)
    assert room.chat(started, BODY).status == 200
    assert len(room.engine.requests) == 4
    assert [call.status for call in room.calls(started)] == ["ok", "ok"]


def test_an_engine_that_is_slower_than_its_limit_is_not_asked_again(tmp_path: Path) -> None:
    with gateway_room(tmp_path, {"gateway": {"upstream_timeout_s": 0.5}}) as room:
        started = room.start()
        room.chat(started, BODY)
        room.engine.behaviour.delay_s = 20.0
        answer = room.chat(started, BODY)
        assert answer.status == 502 and "did not answer" in answer.error["message"]
        assert len(room.engine.requests) == 2


def test_no_engine_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    with gateway_room(tmp_path, {"policies": {"main": {"engine": "", "model": "some/model"}}}) as room:
        config = from_tree({"policies": {"other": {"model": "m"}}}, base_dir=tmp_path)
        assert config.policies["other"].engine == ""
        answer = room.chat(room.start(), {**BODY, "model": "main"})
        assert answer.status == 502 and "policies.main.engine" in answer.error["message"]


# Store and port at fault


def test_a_full_disk_is_said_and_nothing_is_half_written(room: Room) -> None:
    started = room.start()
    assert room.chat(started, BODY).status == 200

    def limit(connection: Any) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

    room.store.write(limit).result(10)
    statuses = set()
    for number in range(60):
        body = {
            "model": "main",
            "messages": [{"role": "user", "content": f"{number} " + "%x" % (7**900 + number)}],
        }
        answer = room.chat(started, body)
        statuses.add(answer.status)
        if answer.status == 503:
            assert answer.error["type"] == "store"
    assert 503 in statuses
    counts = room.store.read(
        lambda c: [c.exec_driver_sql(f"select count(*) from {table}").scalar() for table in ("completions", "choices")]
    )
    assert counts[0] == counts[1], "a completion and its choices are written together"
    room.store.write(lambda c: c.exec_driver_sql("PRAGMA max_page_count = 1073741823").scalar()).result(10)
    assert room.chat(started, BODY).status == 200, "the gateway goes on as soon as there is room"


def test_a_port_that_is_taken_is_named(room: Room, tmp_path: Path) -> None:
    port = int(room.url.rpartition(":")[2])
    config = from_tree({"gateway": {"port": port}}, base_dir=tmp_path)
    with pytest.raises(ConfigError, match=f"gateway.port {port}"):
        serve(config, room.store)
    with pytest.raises(ConfigError, match=r"gateway\.port"):
        listen("203.0.113.1", 1)


def test_memory_of_the_ledger_is_let_go_with_the_calls(room: Room) -> None:
    started = room.start()
    barrier: list[threading.Thread] = [in_thread(lambda: room.chat(started, BODY))[0] for _ in range(8)]
    for thread in barrier:
        thread.join(20)
    assert room.admin("GET", "/proxy/state").json["inflight"] == 0
    end(room, started)
    check: Callable[[], bool] = lambda: room.chat(started, BODY).status == 409  # noqa: E731
    assert check()
