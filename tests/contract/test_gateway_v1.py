"""The REST surface of the compatible protocol, as its controllers and trainers use it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.gateway_room import HELLO, Answer, Room, gateway_room

BODY = {"model": "main", "messages": HELLO}


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    with gateway_room(tmp_path) as room:
        yield room


def create(room: Room, **fields: Any) -> dict[str, Any]:
    answer = room.admin("POST", "/api/rollouts", [{"input": {"data_id": "d1", "q": 1}, **fields}])
    assert answer.status == 201
    rollout: dict[str, Any] = answer.json[0]
    return rollout


def test_a_rollout_has_the_compatible_shape(room: Room) -> None:
    rollout = create(room, config={"timeout_seconds": 5, "local": {"agent_class": "a.B"}}, metadata={"batch_idx": 2})
    assert rollout["input"] == {"data_id": "d1", "q": 1} and rollout["is_train"] is True
    assert rollout["config"] == {
        "timeout_seconds": 5,
        "local": {"agent_class": "a.B", "env_map": {}},
        "k8s": None,
    }
    assert rollout["metadata"] == {"batch_idx": 2}
    assert rollout["status"]["state"] == "queuing" and rollout["status"]["version"] == 1
    assert rollout["status"].keys() == {
        "state", "k8s_job_name", "last_attempt_id", "error_message", "version", "created_at", "updated_at",
    }  # fmt: skip


def test_an_id_that_exists_is_returned_unchanged(room: Room) -> None:
    first = create(room, rollout_id="mine")
    again = create(room, rollout_id="mine", metadata={"other": 1})
    assert again == first


def test_a_training_rollout_on_a_holdout_task_is_refused_before_it_is_queued(tmp_path: Path) -> None:
    question = "How many people joined the Berlin office after March 2021?"
    (tmp_path / "held.jsonl").write_text(json.dumps({"id": "h1", "input": {"question": question}}), "utf-8")
    with gateway_room(tmp_path, {"tasks": {"holdout": "held.jsonl"}}) as room:

        def post(asked: str, **fields: Any) -> Answer:
            item = {"input": {"data_id": "mine", "question": asked}, **fields}
            return room.admin("POST", "/api/rollouts", [{"input": {"question": "something else"}}, item])

        for leaked in (question, question.upper(), "After March 2021, how many people joined the office in Berlin?"):
            answer = post(leaked)
            assert answer.status == 422 and "'h1'" in str(answer.json), answer.json
        assert room.admin("GET", "/api/rollouts?state_in=queuing").json == []
        assert post(question, is_train=False).status == 201
        assert post("How many trains left the Berlin station before May 1999?").status == 201


def test_a_rollout_goes_through_its_states_and_a_repeated_patch_is_no_error(room: Room) -> None:
    rollout_id = create(room)["rollout_id"]
    path = f"/api/rollouts/{rollout_id}"
    running = {"status": {"state": "running", "last_attempt_id": "a1", "k8s_job_name": "job"}}
    first = room.admin("PATCH", path, running)
    assert first.status == 200 and first.json["status"]["version"] == 2
    assert room.admin("PATCH", path, running).status == 200
    assert room.admin("GET", path).json["attempts"] == ["a1"]
    assert room.admin("PATCH", path, {"status": {"state": "succeeded"}}).json["status"]["state"] == "succeeded"
    assert room.admin("PATCH", path, {"status": {"state": "running"}}).status == 409
    terminal = room.admin("GET", "/api/rollouts/terminal").json
    assert terminal["items"] == [{"rollout_id": rollout_id, "state": "succeeded", "data_id": "d1", "is_train": True}]
    assert terminal["total_terminal"] == 1
    assert room.admin("GET", f"/api/rollouts/terminal?after={terminal['next_after']}").json["items"] == []


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/api/rollouts", {"input": {}}),
        ("POST", "/api/rollouts", [{"input": {}, "surprise": 1}]),
        ("POST", "/api/rollouts", [{"input": "text"}]),
        ("POST", "/api/rollouts", [{"input": {}, "rollout_id": "no/slash"}]),
        ("GET", "/api/rollouts", None),
        ("GET", "/api/rollouts?state_in=lost", None),
        ("GET", "/api/rollouts?state_in=running&limit=0", None),
        ("GET", "/api/rollouts/terminal?after=x", None),
        ("POST", "/api/models", {"model": "m"}),
        ("POST", "/api/models", [{"model": "m", "endpoint": "no url"}]),
        ("POST", "/proxy/pause", [1]),
        ("POST", "/proxy/pause", b"{"),
        ("GET", "/api/watch?topic=none", None),
    ],
)
def test_a_wrong_body_or_query_is_422(room: Room, method: str, path: str, body: Any) -> None:
    answer = room.admin(method, path, body)
    assert answer.status == 422 and answer.error["message"]


@pytest.mark.parametrize(
    "body", [[1], {"status": {"surprise": 1}}, {"state": "running"}, {"status": {"state": "lost"}}]
)
def test_a_wrong_patch_is_422(room: Room, body: Any) -> None:
    assert room.admin("PATCH", f"/api/rollouts/{create(room)['rollout_id']}", body).status == 422


def test_deleting_twice_is_no_error(room: Room) -> None:
    path = f"/api/rollouts/{create(room)['rollout_id']}"
    assert room.admin("DELETE", path).status == 204
    assert room.admin("DELETE", path).status == 204
    assert room.admin("GET", path).status == 404


def test_events_are_calls_rewards_and_whatever_was_posted(room: Room) -> None:
    started = room.start()
    room.chat(started, BODY)
    path = f"/api/rollouts/{started.rollout.id}"
    post = f"{path}/attempt/{started.attempt.id}/events"
    assert room.admin("POST", post, {"event_type": "reward", "data": {"value": 0.5}}).status == 200
    assert room.request("POST", post, {"event_type": "note", "data": {"x": 1}}, key=started.token).status == 200
    events = room.admin("GET", path + "/events").json
    assert [event["event_type"] for event in events] == ["model_request", "reward", "note"]
    call = events[0]["data"]
    assert call["response"]["choices"][0]["token_ids"] and call["response"]["prompt_token_ids"]
    assert call["request"] == BODY and call["finish_reason"] == "stop" and call["status"] == "ok"
    [triplet] = room.admin("GET", path + "/events?event_type=model_request&format=triplet").json
    assert triplet["data"]["prompt_token_ids"] == call["response"]["prompt_token_ids"]
    assert triplet["data"]["response_token_ids"] == call["response"]["choices"][0]["token_ids"]
    assert len(triplet["data"]["response_log_probs"]) == len(triplet["data"]["response_token_ids"])
    [reward] = room.trace(started).rewards
    assert reward.value == 0.5
    forged = {"event_type": "model_request", "data": {}}
    assert room.admin("POST", post, forged).status == 422
    assert room.admin("GET", "/api/rollouts/nobody/events").status == 404
    assert room.admin("POST", "/api/rollouts/nobody/attempt/0/events", {"event_type": "x", "data": {}}).status == 404


def test_a_controllers_own_attempt_may_be_called_with_the_servers_key(room: Room) -> None:
    rollout_id = create(room)["rollout_id"]
    room.admin("PATCH", f"/api/rollouts/{rollout_id}", {"status": {"state": "running", "last_attempt_id": "0"}})
    path = f"/proxy/rollout/{rollout_id}/attempt/0/mode/train/openai/v1/chat/completions"
    assert room.admin("POST", path, BODY).status == 200
    events = room.admin("GET", f"/api/rollouts/{rollout_id}/events").json
    assert [event["event_type"] for event in events] == ["model_request"]


def test_a_registered_model_is_served_as_it_is_asked(room: Room) -> None:
    models = [{"model": "Org/Model", "endpoint": room.engine.url + "/v1", "version": 7}]
    assert room.admin("POST", "/api/models", models).status == 201
    assert room.admin("POST", "/api/models", models).status == 201
    assert room.admin("GET", "/api/models").json == models
    room.engine.behaviour.models = ("Org/Model",)
    started = room.start()
    answer = room.chat(started, {**BODY, "model": "Org/Model", "temperature": 0.3, "seed": 1})
    assert answer.headers["x-leyden-policy"] == "Org/Model@7"
    assert answer.headers["x-leyden-rewrites"] == ""
    assert room.engine.requests[-1]["model"] == "Org/Model"
    assert room.engine.requests[-1]["temperature"] == 0.3 and "max_tokens" not in room.engine.requests[-1]
    assert room.admin("DELETE", "/api/models").json == {"status": "ok"}
    assert room.chat(started, {**BODY, "model": "Org/Model"}).status == 404


def test_step_rewards_attach_to_a_call_of_the_attempt(room: Room) -> None:
    started = room.start()
    call_id = room.chat(started, BODY).headers["x-leyden-call"]
    path = f"/api/rollouts/{started.rollout.id}/attempts/{started.attempt.id}/rewards"
    assert room.admin("POST", path, {"name": "step", "value": 1, "call_id": call_id}).status == 201
    assert room.admin("POST", path, {"name": "step", "value": 1, "call_id": "call_nobody"}).status == 404
    [reward] = room.trace(started).rewards
    assert (reward.call_id, reward.value, reward.source) == (call_id, 1.0, "api")


def test_a_trace_is_readable_as_json(room: Room) -> None:
    started = room.start()
    room.chat(started, BODY)
    trace = room.admin("GET", f"/api/rollouts/{started.rollout.id}/trace").json
    assert trace["calls"][0]["choices"][0]["completion_ids"][-1] == 2
    assert trace["rollout"]["id"] == started.rollout.id


def test_watching_returns_when_something_changed(room: Room) -> None:
    count = room.admin("GET", "/api/watch?topic=rollouts&timeout_s=0").json["count"]
    create(room)
    assert room.admin("GET", f"/api/watch?topic=rollouts&after={count}&timeout_s=20").json["count"] > count


def test_policies_and_steps_are_listed(room: Room) -> None:
    assert room.admin("GET", "/api/policies").json == [{"policy": "main", "serving": None}]
    assert room.admin("GET", "/api/policies/main/versions").json == []
    assert room.admin("GET", "/api/policies/nobody/versions").status == 404
    assert room.admin("GET", "/api/steps").json == []
