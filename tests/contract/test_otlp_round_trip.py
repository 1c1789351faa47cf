"""A trace written as OTLP and read into another store is the same trace, in text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.contract.gateway_room import HELLO, Answer, Room, gateway_room
from tests.contract.test_gateway_otlp import PROTOBUF, post, request_with, told

from leyden.base.records import Call, Provenance, Span, Trace
from leyden.testing.running import Started
from leyden.testing.scripted import Reply
from leyden.traces.telemetry.wire import to_json
from leyden.traces.telemetry.writing import request_of

TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
]


def reply(body: Mapping[str, Any]) -> Reply:
    if "prompt" in body:
        return Reply(text="completed")
    last = body["messages"][-1]
    if last["role"] == "tool":
        return Reply(text="it is 2")
    return (
        Reply(text="let me see", tool_calls=(("add", '{"a":  1}'),))
        if body.get("tools")
        else Reply(text="h\u00e9 \u4f60")
    )


def lived(room: Room) -> Started:
    """An attempt with everything that a trace can have."""
    room.engine.behaviour.reply = reply
    started = room.start()
    messages: list[Any] = [{"role": "system", "content": "add"}, {"role": "user", "content": "1 + 1?"}]
    sdk = room.sdk(started)
    first = sdk.chat.completions.create(model="main", messages=messages, tools=TOOLS, temperature=0.5)
    calls = first.choices[0].message.tool_calls
    assert calls
    messages += [first.choices[0].message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": calls[0].id, "content": "2"}]
    for _ in sdk.chat.completions.create(model="main", messages=messages, tools=TOOLS, stream=True):
        pass
    sdk.chat.completions.create(model="main", messages=HELLO, n=2)
    sdk.completions.create(model="main", prompt="complete me")
    assert room.chat(started, {"model": "nobody", "messages": HELLO}).status == 404
    path = f"/api/rollouts/{started.rollout.id}/attempts/{started.attempt.id}"
    state = {
        "name": "row",
        "kind": "state_after",
        "attributes": {"deep": {"list": [1, 2.5, None, "x", {}], "no": False}},
    }
    assert room.admin("POST", path + "/spans", state).status == 201
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", "n": 7}
    told(post(room, request_with({"work": 1}, tool), key=started.token))
    first_call = room.calls(started)[0]
    for body in (
        {"name": "correct", "value": 1},
        {"name": "step", "value": 0.25, "call_id": first_call.id},
        {"name": "step", "value": 0.5, "call_id": first_call.id},
    ):
        assert room.admin("POST", path + "/rewards", body).status == 201
    return started


def moved(there: Room, trace: Trace, media: str) -> Answer:
    """The trace as it arrives in another store, under the same ids."""
    made = [{"input": {}, "rollout_id": trace.rollout.id}]
    assert there.admin("POST", "/api/rollouts", made).status == 201
    running = {"status": {"state": "running", "last_attempt_id": trace.attempt.id}}
    assert there.admin("PATCH", f"/api/rollouts/{trace.rollout.id}", running).status == 200
    request = request_of([trace])
    raw = request.SerializeToString() if media == PROTOBUF else to_json(request)
    return post(there, raw, key=there.gateway.admin_key, media=media)


def call_text(call: Call) -> dict[str, Any]:
    """What two records of one call have in common."""
    response = call.response or {}
    messages = call.request.get("messages", call.request.get("prompt"))
    choices = response.get("choices", ())
    said = [choice["message"] if "message" in choice else choice["text"] for choice in choices]
    names = ("role", "content", "tool_calls")
    kept = [{k: one[k] for k in names if one.get(k)} if isinstance(one, dict) else one for one in said]
    return {
        "id": call.id, "alias": call.alias, "policy": call.policy, "version": call.policy_version, "messages": messages,
        "tools": call.request.get("tools"), "said": kept,
        "texts": [(choice.index, choice.text, choice.finish_reason) for choice in call.choices],
        "usage": response.get("usage"), "response_id": response.get("id"), "status": call.status,
        "started_at": call.started_at, "temperature": call.sampling.get("temperature"),
    }  # fmt: skip


def by_id(spans: Any) -> dict[str, Span]:
    return {span.id: span for span in spans}


@pytest.mark.parametrize("media", [PROTOBUF, "application/json"])
def test_a_trace_is_the_same_in_another_store_and_when_it_is_sent_twice(tmp_path: Path, media: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    with gateway_room(tmp_path / "here") as here, gateway_room(tmp_path / "there") as there:
        started = lived(here)
        before = here.trace(started)
        assert len(before.calls) == 4 and len(before.spans) == 4 and len(before.rewards) == 3
        for _ in range(2):
            answer = moved(there, before, media)
            assert answer.raw in (b"", b"{}"), answer
        after = there.trace(started)
    assert [call_text(call) for call in after.calls] == [call_text(call) for call in before.calls]
    assert {call.provenance for call in before.calls} == {Provenance.SERVED}
    assert {call.provenance for call in after.calls} == {Provenance.RETOKENIZED}
    for one, other in zip(after.calls, before.calls, strict=True):
        assert one.latency_ms == pytest.approx(other.latency_ms, abs=0.01)
    assert by_id(after.spans) == by_id(before.spans)
    assert sorted(after.rewards, key=repr) == sorted(before.rewards, key=repr)
    again = request_of([after]).resource_spans[0].scope_spans[0].spans
    first = request_of([before]).resource_spans[0].scope_spans[0].spans
    assert [(span.span_id, span.parent_span_id) for span in again] == [(s.span_id, s.parent_span_id) for s in first]


def test_ids_of_another_attempt_are_refused_by_name(tmp_path: Path) -> None:
    with gateway_room(tmp_path) as room:
        trace = room.trace(lived(room))
        other = room.start()
        request = request_of([trace])
        path = f"/proxy/rollout/{other.rollout.id}/attempt/{other.attempt.id}/v1/traces"
        answer = told(post(room, request, key=room.gateway.admin_key, path=path))
        assert answer.partial_success.rejected_spans == len(trace.calls) + len(trace.spans)
        assert "in another attempt" in answer.partial_success.error_message
        assert room.trace(other).spans == [] and room.trace(other).calls == []


def test_an_attempt_that_sends_an_export_gets_ids_of_its_own(tmp_path: Path) -> None:
    with gateway_room(tmp_path) as room:
        trace = room.trace(lived(room))
        other = room.start()
        told(post(room, request_of([trace]), key=other.token))
        copy = room.trace(other)
        assert len(copy.calls) == len(trace.calls) and len(copy.spans) == len(trace.spans) and copy.rewards == []
        assert not {call.id for call in copy.calls} & {call.id for call in trace.calls}
        assert {call.policy for call in copy.calls} == {"main"}
