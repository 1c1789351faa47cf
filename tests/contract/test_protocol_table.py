"""A client written from the table of the compatible protocol, and every row of it with its error cases.

`Client` knows addresses, keys and bodies from the table alone: nothing of ours is imported by it.
"""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.contract.gateway_room import Room, gateway_room

from leyden.testing.scripted import Reply

CHAT = {"model": "main", "messages": [{"role": "user", "content": "hi"}]}
STATES = ("queuing", "running", "succeeded", "failed")
ALLOWED = {("queuing", "running"), ("queuing", "failed"), ("running", "succeeded"), ("running", "failed")}


@dataclass(frozen=True, slots=True)
class Client:
    """The table."""

    url: str
    key: str | None
    header: str = "authorization"

    def send(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """(status, body as JSON if it is that)."""
        raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        if self.key is not None:
            headers[self.header] = f"Bearer {self.key}" if self.header == "authorization" else self.key
        request = urllib.request.Request(self.url + path, raw, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status, answer = response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                status, answer = error.code, error.read()
        try:
            return status, json.loads(answer)
        except ValueError:
            return status, answer

    def create(self, *items: dict[str, Any]) -> list[dict[str, Any]]:
        status, made = self.send("POST", "/api/rollouts", list(items))
        assert status == 201, made
        assert isinstance(made, list)
        return made

    def patch(self, rollout_id: str, **status: Any) -> tuple[int, Any]:
        return self.send("PATCH", f"/api/rollouts/{rollout_id}", {"status": status})

    def running(self, attempt_id: str = "0", **fields: Any) -> str:
        """A rollout that runs; its id."""
        rollout_id = str(self.create({"input": {"q": 1}, **fields})[0]["rollout_id"])
        assert self.patch(rollout_id, state="running", last_attempt_id=attempt_id)[0] == 200
        return rollout_id

    def call(self, rollout_id: str, body: Any, *, attempt: str = "0", mode: str = "train", kind: str = "chat/") -> Any:
        path = f"/proxy/rollout/{rollout_id}/attempt/{attempt}/mode/{mode}/openai/v1/{kind}completions"
        return self.send("POST", path, body)

    def event(self, rollout_id: str, body: Any, attempt: str = "0") -> tuple[int, Any]:
        return self.send("POST", f"/api/rollouts/{rollout_id}/attempt/{attempt}/events", body)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with gateway_room(tmp_path_factory.mktemp("table")) as room:
        yield room


@pytest.fixture
def client(room: Room) -> Client:
    room.engine.behaviour.reply = lambda body: Reply()
    return Client(room.url, room.gateway.admin_key)


ROWS = [
    ("POST", "/api/rollouts"),
    ("GET", "/api/rollouts?state_in=queuing"),
    ("GET", "/api/rollouts/terminal"),
    ("GET", "/api/rollouts/x"),
    ("PATCH", "/api/rollouts/x"),
    ("DELETE", "/api/rollouts/x"),
    ("POST", "/api/rollouts/x/attempt/0/events"),
    ("GET", "/api/rollouts/x/events"),
    ("POST", "/api/models"),
    ("DELETE", "/api/models"),
    ("POST", "/proxy/rollout/x/attempt/0/mode/train/openai/v1/chat/completions"),
    ("POST", "/proxy/rollout/x/attempt/0/mode/val/openai/v1/completions"),
    ("POST", "/proxy/pause"),
    ("POST", "/proxy/resume"),
    ("GET", "/proxy/state"),
]


def test_health_needs_no_key_and_every_other_row_does(room: Room) -> None:
    for key in (None, "wrong"):
        assert Client(room.url, key).send("GET", "/healthz") == (200, {"status": "ok"})
        for method, path in ROWS:
            assert Client(room.url, key).send(method, path, None if method == "GET" else {})[0] == 401, (method, path)


def test_a_key_may_come_in_either_header(room: Room) -> None:
    client = Client(room.url, room.gateway.admin_key, "x-api-key")
    assert client.send("GET", "/proxy/state")[0] == 200
    assert client.create({"input": {}})


def test_the_key_of_an_attempt_opens_nothing_but_its_own_attempt(room: Room, client: Client) -> None:
    started = room.start()
    agent = Client(room.url, started.token)
    for method, path in ROWS:
        status, _ = agent.send(method, path, None if method == "GET" else {})
        assert status in (403, 404), (method, path, status)
    assert agent.event(started.rollout.id, {"event_type": "note", "data": {}}, started.attempt.id)[0] == 200
    assert agent.call(started.rollout.id, CHAT, attempt=started.attempt.id)[0] == 200
    other = room.start()
    assert agent.event(other.rollout.id, {"event_type": "note", "data": {}}, other.attempt.id)[0] == 403
    assert agent.call(other.rollout.id, CHAT, attempt=other.attempt.id)[0] == 403


def test_rollouts_are_created_with_defaults_in_order_and_once_per_id(client: Client) -> None:
    assert client.create() == []
    first, second = client.create({"input": {"a": 1}}, {"input": {}, "rollout_id": "table-own", "is_train": False})
    assert first["is_train"] is True and first["metadata"] == {} and first["status"]["state"] == "queuing"
    assert first["config"] == {"timeout_seconds": 3600, "local": None, "k8s": None}
    assert second["rollout_id"] == "table-own" and second["is_train"] is False
    [again, other] = client.create({"input": {"changed": 1}, "rollout_id": "table-own"}, {"input": {}})
    assert again == second
    status, listed = client.send("GET", "/api/rollouts?state_in=queuing&state_in=running&limit=10000")
    ids = [rollout["rollout_id"] for rollout in listed]
    assert status == 200 and ids.index(first["rollout_id"]) < ids.index("table-own") < ids.index(other["rollout_id"])
    assert client.send("GET", "/api/rollouts?state_in=queuing&limit=1")[1] == [listed[ids.index(ids[0])]]


@pytest.mark.parametrize("before", STATES)
@pytest.mark.parametrize("after", STATES)
def test_only_the_transitions_of_the_table_are_allowed(client: Client, before: str, after: str) -> None:
    rollout_id = client.create({"input": {}})[0]["rollout_id"]
    road = {"queuing": [], "running": ["running"], "succeeded": ["running", "succeeded"], "failed": ["failed"]}[before]
    version = 1
    for state in road:
        status, rollout = client.patch(
            rollout_id, state=state, **({"last_attempt_id": "0"} if state == "running" else {})
        )
        assert status == 200 and rollout["status"]["version"] == version + 1
        version += 1
    extra = {"last_attempt_id": "0"} if after == "running" else {}
    status, answer = client.patch(rollout_id, state=after, **extra)
    if (before, after) in ALLOWED:
        assert status == 200 and answer["status"]["state"] == after and answer["status"]["version"] == version + 1
    elif before == after:
        assert status == 200 and answer["status"]["state"] == after, "a repeated identical PATCH is no error"
    else:
        assert status == 409 and before in answer["error"]["message"]


def test_a_patch_sets_what_it_names_and_refuses_what_it_does_not_know(client: Client) -> None:
    rollout_id = client.create({"input": {}})[0]["rollout_id"]
    status, rollout = client.patch(rollout_id, state="running", k8s_job_name="job-1", last_attempt_id="0")
    assert (
        status == 200 and rollout["status"]["k8s_job_name"] == "job-1" and rollout["status"]["last_attempt_id"] == "0"
    )
    status, rollout = client.patch(rollout_id, state="failed", error_message="why")
    assert status == 200 and rollout["status"]["error_message"] == "why"
    status, detail = client.send("GET", f"/api/rollouts/{rollout_id}")
    assert status == 200 and detail["rollout"] == rollout and detail["attempts"] == ["0"]
    assert client.patch(rollout_id, version=9)[0] == 422
    assert client.send("PATCH", f"/api/rollouts/{rollout_id}", {"input": {}})[0] == 422
    assert client.send("PATCH", f"/api/rollouts/{rollout_id}", [])[0] == 422
    assert client.patch("nobody", state="running")[0] == 404
    assert client.send("GET", "/api/rollouts/nobody")[0] == 404


def test_the_cursor_over_terminal_rollouts_misses_none(client: Client) -> None:
    start = client.send("GET", "/api/rollouts/terminal?limit=10000")[1]["next_after"]
    ids = []
    for number in range(5):
        ids.append(client.running(is_train=number % 2 == 0))
        assert client.patch(ids[-1], state="succeeded" if number % 2 else "failed")[0] == 200
    after, seen = start, []
    while True:
        status, page = client.send("GET", f"/api/rollouts/terminal?after={after}&limit=2")
        assert status == 200 and len(page["items"]) <= 2 and page["total_terminal"] >= 5
        if not page["items"]:
            break
        seen += page["items"]
        after = page["next_after"]
    assert [item["rollout_id"] for item in seen] == ids
    assert [(item["state"], item["is_train"]) for item in seen][:2] == [("failed", True), ("succeeded", False)]
    assert client.send("GET", "/api/rollouts/terminal?after=-1")[0] == 422


def test_a_rollout_that_was_deleted_is_gone_with_its_events(client: Client) -> None:
    rollout_id = client.running()
    assert client.event(rollout_id, {"event_type": "note", "data": {}})[0] == 200
    assert client.send("DELETE", f"/api/rollouts/{rollout_id}")[0] == 204
    assert client.send("DELETE", f"/api/rollouts/{rollout_id}")[0] == 204
    assert client.send("GET", f"/api/rollouts/{rollout_id}/events")[0] == 404
    assert client.event(rollout_id, {"event_type": "note", "data": {}})[0] == 404
    assert client.call(rollout_id, CHAT)[0] == 404


@pytest.mark.parametrize("value", ["NaN", "Infinity", "true", '"1"', "null", "[1]"])
def test_a_reward_that_is_no_finite_number_is_422(client: Client, value: str) -> None:
    rollout_id = client.running()
    raw = f'{{"event_type": "reward", "data": {{"value": {value}}}}}'.encode()
    assert client.event(rollout_id, raw)[0] == 422
    assert client.send("GET", f"/api/rollouts/{rollout_id}/events")[1] == []


def test_events_are_those_of_the_last_attempt_with_their_types(client: Client) -> None:
    rollout_id = client.running()
    before = time.time()
    status, event = client.event(rollout_id, {"event_type": "note", "data": {"x": [1, None]}})
    assert status == 200 and before - 1 <= event.pop("timestamp") <= time.time() + 1
    assert event == {"event_type": "note", "rollout_id": rollout_id, "attempt_id": "0", "data": {"x": [1, None]}}
    assert client.event(rollout_id, {"event_type": "reward", "data": {"value": 1, "source": "agent"}})[0] == 200
    assert client.call(rollout_id, CHAT)[0] == 200
    path = f"/api/rollouts/{rollout_id}/events"
    assert [e["event_type"] for e in client.send("GET", path)[1]] == ["note", "reward", "model_request"]
    [reward] = client.send("GET", path + "?event_type=reward")[1]
    assert reward["data"] == {"value": 1, "source": "agent"}
    [triplet] = client.send("GET", path + "?event_type=model_request&format=triplet")[1]
    assert {"prompt_token_ids", "response_token_ids", "response_log_probs", "server"} <= triplet["data"].keys()
    [whole] = client.send("GET", path + "?event_type=model_request")[1]
    assert whole["data"].keys() >= {
        "model", "model_version", "request", "response", "server", "latency_ms", "http_status", "status",
        "retry_count", "usage", "finish_reason",
    }  # fmt: skip
    assert client.event(rollout_id, {"event_type": "note", "data": []})[0] == 422
    assert client.event(rollout_id, {"data": {}})[0] == 422
    assert client.event(rollout_id, {"event_type": "note", "data": {}}, attempt="7")[0] == 404


def test_models_are_upserted_and_cleared(room: Room, client: Client) -> None:
    one = {"model": "table/m", "endpoint": room.engine.url + "/v1", "version": 1}
    assert client.send("POST", "/api/models", [one])[0] == 201
    assert client.send("POST", "/api/models", [{**one, "version": 2}])[0] == 201
    assert client.send("GET", "/api/models")[1] == [{**one, "version": 2}]
    assert client.send("POST", "/api/models", one)[0] == 422
    assert client.send("POST", "/api/models", [{**one, "version": -1}])[0] == 422
    assert client.send("DELETE", "/api/models") == (200, {"status": "ok"})
    assert client.send("GET", "/api/models")[1] == []


def test_both_kinds_of_calls_are_answered_in_both_modes(client: Client) -> None:
    for mode in ("train", "val"):
        rollout_id = client.running(is_train=mode == "train")
        status, chat = client.call(rollout_id, CHAT, mode=mode)
        assert status == 200 and chat["choices"][0]["message"]["content"] == "ok"
        status, text = client.call(rollout_id, {"model": "main", "prompt": "hi"}, mode=mode, kind="")
        assert status == 200 and text["choices"][0]["text"] == "ok"
        other = "val" if mode == "train" else "train"
        assert client.call(rollout_id, CHAT, mode=other)[0] == 403
    assert client.call(rollout_id, CHAT, mode="test")[0] == 404


def test_what_they_answer_wrongly_is_mended(client: Client) -> None:
    rollout_id = client.running()
    assert client.call(rollout_id, [CHAT])[0] == 422
    assert client.call(rollout_id, b"{")[0] == 400
    status, raw = client.call(rollout_id, {**CHAT, "stream": True})
    assert status == 200 and raw.count(b"data: ") > 2 and raw.rstrip().endswith(b"data: [DONE]")
    assert client.call(rollout_id, CHAT, attempt="7")[0] == 404
    assert client.call("nobody", CHAT)[0] == 404
    assert client.patch(rollout_id, state="succeeded")[0] == 200
    assert client.call(rollout_id, CHAT)[0] == 409


def test_a_pause_holds_calls_and_tells_its_state(client: Client) -> None:
    rollout_id = client.running()
    status, state = client.send("POST", "/proxy/pause", {"retry_after_seconds": 2, "reason": "weights"})
    told = {name: state[name] for name in ("paused", "retry_after_seconds", "reason", "inflight")}
    assert status == 200 and told == {"paused": True, "retry_after_seconds": 2, "reason": "weights", "inflight": 0}
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(client.call(rollout_id, CHAT)))
    waiting.start()
    deadline = time.monotonic() + 60
    while client.send("GET", "/proxy/state")[1]["waiting"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert answers == []
    status, state = client.send("POST", "/proxy/resume", {})
    assert status == 200 and state["paused"] is False
    waiting.join(60)
    assert [status for status, _ in answers] == [200]
    assert client.send("POST", "/proxy/pause", {"retry_after_seconds": -1})[0] == 422
    assert client.send("POST", "/proxy/pause", {"for": 1})[0] == 422
