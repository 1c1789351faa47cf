"""OTLP ingest with the real SDK and exporter, real instrumentations, and bad bytes."""

import gzip
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status as WireStatus
from tests.contract.gateway_room import Answer, Room, gateway_room

from leyden.base.records import Drop, Outcome, Provenance
from leyden.gateway.otlp import MEDIA
from leyden.testing.running import Started
from leyden.testing.scripted import Reply
from leyden.traces.assemble import assemble
from leyden.traces.telemetry.wire import MAX_SPANS, add_attributes, to_json

PROTOBUF = "application/x-protobuf"
TRACE, SPAN = bytes(range(1, 17)), bytes(range(1, 9))
NOW_NS = 1_900_000_000 * 10**9
CHAT: dict[str, Any] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.model": "far",
    "gen_ai.response.id": "resp-1",
    "gen_ai.usage.input_tokens": 3,
    "gen_ai.usage.output_tokens": 2,
    "gen_ai.input.messages": '[{"role":"user","parts":[{"type":"text","content":"hi"}]}]',
    "gen_ai.output.messages": (
        '[{"role":"assistant","parts":[{"type":"text","content":"hello"}],"finish_reason":"stop"}]'
    ),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with gateway_room(tmp_path_factory.mktemp("otlp")) as room:
        yield room


@pytest.fixture
def room(shared: Room) -> Room:
    """One gateway for all tests that need no configuration of their own; each has attempts of its own."""
    shared.engine.behaviour.reply = lambda body: Reply()
    return shared


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    """A gateway whose agents may reward themselves."""
    with gateway_room(tmp_path_factory.mktemp("trusting"), {"rewards": {"from_agent": True}}) as room:
        yield room


def request_with(*attributes: Mapping[str, Any], name: str = "chat far") -> ExportTraceServiceRequest:
    """One span for each mapping."""
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    scope.scope.name = "hand"
    for number, told in enumerate(attributes):
        span = scope.spans.add(trace_id=TRACE, span_id=(number + 1).to_bytes(8, "big"), name=name, kind=3)
        span.start_time_unix_nano = NOW_NS + number * 10**9
        span.end_time_unix_nano = span.start_time_unix_nano + 5 * 10**8
        add_attributes(span.attributes, told)
    return request


def path_of(started: Started) -> str:
    return f"/proxy/rollout/{started.rollout.id}/attempt/{started.attempt.id}/v1/traces"


def post(
    room: Room,
    body: bytes | ExportTraceServiceRequest,
    *,
    key: str | None,
    path: str = "/v1/traces",
    media: str = PROTOBUF,
    coding: str | None = None,
) -> Answer:
    raw = body if isinstance(body, bytes) else body.SerializeToString()
    headers = {"content-type": media} | ({"content-encoding": coding} if coding else {})
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(room.url + path, raw, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return Answer(response.status, dict(response.headers), response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, dict(error.headers), error.read())


def told(answer: Answer) -> ExportTraceServiceResponse:
    assert answer.status == 200, answer
    return ExportTraceServiceResponse.FromString(answer.raw)


def run_harness(room: Room, started: Started, code: str, *arguments: str) -> None:
    """A process that knows only its environment, as a harness does."""
    env = {
        **os.environ,
        "OPENAI_BASE_URL": started.base_url(room.url),
        "OPENAI_API_KEY": started.token,
        "OTEL_EXPORTER_OTLP_ENDPOINT": room.url + path_of(started).removesuffix("/v1/traces"),
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{started.token}",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_SERVICE_NAME": "my-agent",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Failed to export" not in done.stderr, done.stderr


SDK = """
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
tracer = provider.get_tracer("my.agent")
"""

BY_HAND = (
    SDK
    + """
import json
with tracer.start_as_current_span("invoke_agent helper", attributes={"gen_ai.operation.name": "invoke_agent"}):
    with tracer.start_as_current_span("chat far") as span:
        span.set_attributes({
            "gen_ai.operation.name": "chat", "gen_ai.request.model": "far", "gen_ai.request.temperature": 0.5,
            "gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 4,
            "gen_ai.input.messages": json.dumps([
                {"role": "system", "parts": [{"type": "text", "content": "be brief"}]},
                {"role": "user", "parts": [{"type": "text", "content": "1 + 1?"}]},
            ]),
            "gen_ai.output.messages": json.dumps([{"role": "assistant", "finish_reason": "tool_call", "parts": [
                {"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1, "b": 1}},
            ]}]),
        })
    with tracer.start_as_current_span("execute_tool add", attributes={
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", "gen_ai.tool.call.id": "c1",
        "gen_ai.tool.call.arguments": '{"a": 1, "b": 1}', "gen_ai.tool.call.result": "2",
    }):
        pass
    with tracer.start_as_current_span("judge", attributes={"leyden.reward.correct": 1.0}):
        pass
provider.shutdown()
"""
)


def test_spans_of_the_real_sdk_become_a_call_a_tool_a_reward_and_spans(trusting: Room) -> None:
    room = trusting
    started = room.start()
    run_harness(room, started, BY_HAND)
    trace = room.trace(started)
    [call] = trace.calls
    assert (call.dialect, call.alias, call.provenance, call.seq) == ("otlp", "far", Provenance.RETOKENIZED, 0)
    assert call.request["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1 + 1?"},
    ]
    assert call.response is not None and call.sampling == {"temperature": 0.5}
    [tool_call] = call.response["choices"][0]["message"]["tool_calls"]
    assert tool_call["function"] == {"name": "add", "arguments": '{"a":1,"b":1}'}
    assert call.choices[0].finish_reason == "tool_calls" and call.num_sampled == 0
    assert call.response["usage"] == {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
    kinds = {span.name: span for span in trace.spans}
    assert {name: span.kind for name, span in kinds.items()} == {
        "invoke_agent helper": "custom", "chat far": "call", "add": "tool", "judge": "custom",
    }  # fmt: skip
    assert kinds["chat far"].attributes["call"] == call.id
    assert "gen_ai.input.messages" not in kinds["chat far"].attributes
    root = kinds["invoke_agent helper"].attributes["otel"]
    for name in ("chat far", "add", "judge"):
        around = kinds[name].attributes["otel"]
        assert (around["trace_id"], around["parent_span_id"]) == (root["trace_id"], root["span_id"])
        assert around["resource"]["service.name"] == "my-agent"
    assert (kinds["add"].attributes["arguments"], kinds["add"].attributes["result"]) == ('{"a": 1, "b": 1}', "2")
    [reward] = trace.rewards
    assert (reward.name, reward.value, reward.source, reward.call_id) == ("correct", 1.0, "agent", None)


INSTRUMENTED = (
    SDK
    + """
import sys
import openai
if sys.argv[1] == "openinference":
    from openinference.instrumentation.openai import OpenAIInstrumentor
else:
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor
OpenAIInstrumentor().instrument(tracer_provider=provider)
if sys.argv[2] == "elsewhere":
    client = openai.OpenAI(base_url=sys.argv[3], api_key="k")
else:
    client = openai.OpenAI()
tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1 + 1?"}]
first = client.chat.completions.create(model="main", messages=messages, tools=tools, temperature=0.5)
messages.append(first.choices[0].message.model_dump(exclude_none=True))
messages.append({"role": "tool", "tool_call_id": first.choices[0].message.tool_calls[0].id, "content": "2"})
stream = client.chat.completions.create(
    model="main", messages=messages, tools=tools, stream=True, stream_options={"include_usage": True}
)
for event in stream:
    pass
provider.shutdown()
"""
)


def add_once(body: Mapping[str, Any]) -> Reply:
    answered = any(message["role"] == "tool" for message in body["messages"])
    return Reply(text="it is 2") if answered else Reply(text="", tool_calls=(("add", '{"a": 1}'),))


@pytest.mark.parametrize("library", ["openinference", "openllmetry"])
def test_a_call_that_the_gateway_captured_is_not_counted_again(room: Room, library: str) -> None:
    room.engine.behaviour.reply = add_once
    started = room.start()
    run_harness(room, started, INSTRUMENTED, library, "here")
    trace = room.trace(started)
    assert [call.dialect for call in trace.calls] == ["openai_chat", "openai_chat"]
    assert all(call.provenance is Provenance.SERVED for call in trace.calls)
    spans = [span for span in trace.spans if span.kind == "call"]
    assert [span.attributes["call"] for span in spans] == [call.id for call in trace.calls]


@pytest.mark.parametrize("library", ["openinference", "openllmetry"])
def test_calls_that_passed_the_gateway_by_are_told_by_the_instrumentation(room: Room, library: str) -> None:
    room.engine.behaviour.reply = add_once
    started = room.start()
    run_harness(room, started, INSTRUMENTED, library, "elsewhere", room.engine.url + "/v1")
    trace = room.trace(started)
    first, second = trace.calls
    assert {call.provenance for call in trace.calls} == {Provenance.RETOKENIZED}
    assert [call.alias for call in trace.calls] == ["main", "main"]
    assert first.request["messages"] == [
        {"role": "system", "content": "add"},
        {"role": "user", "content": "1 + 1?"},
    ]
    assert first.request["temperature"] == 0.5
    assert first.request["tools"][0]["function"]["name"] == "add"
    assert first.response is not None and second.response is not None
    [called] = first.response["choices"][0]["message"]["tool_calls"]
    assert called["function"]["name"] == "add" and json.loads(called["function"]["arguments"]) == {"a": 1}
    assert first.choices[0].finish_reason == "tool_calls"
    assert second.choices[0].text == "it is 2" and second.choices[0].finish_reason == "stop"
    assert [message["role"] for message in second.request["messages"]] == ["system", "user", "assistant", "tool"]
    assert second.request["messages"][3]["content"] == "2"
    assert second.response["usage"]["completion_tokens"] == len("it is 2") + 1


def test_reported_calls_are_never_trained_by_rl(room: Room) -> None:
    started = room.start()
    told(post(room, request_with(CHAT), key=started.token))
    found = assemble(
        [room.trace(started)],
        policy="far",
        min_version=None,
        max_tokens=100,
        trainable_outcomes=dict.fromkeys(Outcome, "train"),
    )
    assert [action.drop for action in found.actions] == [Drop.RETOKENIZED] and found.trained == 0


@pytest.mark.parametrize("media", sorted(MEDIA))
@pytest.mark.parametrize("coding", [None, "gzip", "identity"])
@pytest.mark.parametrize("path", ["key", "attempt", "mode", "openai"])
def test_every_encoding_and_address_is_taken(room: Room, media: str, coding: str | None, path: str) -> None:
    started = room.start()
    request = request_with(CHAT)
    raw = request.SerializeToString() if media == PROTOBUF else to_json(request)
    raw = gzip.compress(raw, mtime=0) if coding == "gzip" else raw
    by_path = path_of(started)
    paths = {
        "key": "/v1/traces",
        "attempt": by_path,
        "mode": by_path.replace("/v1/", "/mode/train/v1/"),
        "openai": by_path.replace("/v1/", "/mode/train/openai/v1/"),
    }
    answer = post(room, raw, key=started.token, path=paths[path], media=media, coding=coding)
    assert answer.status == 200 and answer.headers["content-type"].startswith(media)
    assert answer.raw == (b"" if media == PROTOBUF else b"{}")
    assert room.calls(started)[0].choices[0].text == "hello"


def test_a_batch_that_an_exporter_sends_again_is_stored_once(trusting: Room) -> None:
    room = trusting
    started = room.start()
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add", "leyden.reward.step": 0.5}
    request = request_with({**CHAT, "leyden.reward.good": 1}, tool, {"other": True})
    for _ in range(3):
        assert not told(post(room, request, key=started.token)).HasField("partial_success")
    as_json = post(room, to_json(request), key=started.token, media="application/json")
    assert as_json.status == 200
    trace = room.trace(started)
    assert (len(trace.calls), len(trace.spans)) == (1, 3)
    assert {(reward.name, reward.value, reward.call_id) for reward in trace.rewards} == {
        ("good", 1.0, trace.calls[0].id),
        ("step", 0.5, None),
    }


def test_equal_span_ids_of_different_attempts_are_different_spans(room: Room) -> None:
    one, other = room.start(), room.start()
    for started in (one, other):
        told(post(room, request_with(CHAT, {"x": 1}), key=started.token))
    for started in (one, other):
        trace = room.trace(started)
        assert (len(trace.calls), len(trace.spans)) == (1, 2)


def test_an_attempt_may_not_reward_itself_and_is_told(room: Room) -> None:
    started = room.start()
    answer = told(post(room, request_with({"leyden.reward.correct": 1.0}), key=started.token))
    assert answer.partial_success.rejected_spans == 0
    assert "rewards.from_agent" in answer.partial_success.error_message
    trace = room.trace(started)
    assert trace.rewards == [] and len(trace.spans) == 1
    told(post(room, request_with({"leyden.reward.correct": 0.5}), key=room.gateway.admin_key, path=path_of(started)))
    [reward] = room.trace(started).rewards
    assert (reward.value, reward.source) == (0.5, "api")


def test_rewards_of_agent_lightning_are_rewards(trusting: Room) -> None:
    room = trusting
    started = room.start()
    spans = (
        {"agentlightning.reward.0.name": "task", "agentlightning.reward.0.value": 0.75,
         "agentlightning.reward.1.name": "brief", "agentlightning.reward.1.value": 1},
        {"agentlightning.reward.0.value": 0.25},
    )  # fmt: skip
    told(post(room, request_with(*spans, name="agentlightning.annotation"), key=started.token))
    rewards = room.trace(started).rewards
    assert [(reward.name, reward.value) for reward in rewards] == [("task", 0.75), ("brief", 1.0), ("reward", 0.25)]


@pytest.mark.parametrize("value", [True, "1.0", float("nan"), float("inf")])
def test_a_reward_that_is_no_finite_number_refuses_its_span_by_name(trusting: Room, value: Any) -> None:
    room = trusting
    started = room.start()
    answer = told(post(room, request_with({"leyden.reward.correct": value}, {"x": 1}), key=started.token))
    trace = room.trace(started)
    assert answer.partial_success.rejected_spans == 1 and "chat far" in answer.partial_success.error_message
    assert trace.rewards == [] and [span.attributes["x"] for span in trace.spans] == [1]


def test_a_span_without_valid_ids_is_refused_by_name_and_the_others_are_stored(room: Room) -> None:
    started = room.start()
    request = request_with({"x": 1}, {"x": 2}, {"x": 3}, {"x": 4})
    spans = request.resource_spans[0].scope_spans[0].spans
    spans[0].trace_id = b"\0" * 16
    spans[1].span_id = b"short"
    add_attributes(spans[2].attributes, {"bad": float("nan")})
    answer = told(post(room, request, key=started.token))
    assert answer.partial_success.rejected_spans == 3
    assert "trace id" in answer.partial_success.error_message and "NaN" in answer.partial_success.error_message
    assert [span.attributes["x"] for span in room.trace(started).spans] == [4]


def test_a_failed_call_without_an_answer_is_a_span_and_no_call(room: Room) -> None:
    started = room.start()
    request = request_with({"gen_ai.operation.name": "chat", "gen_ai.request.model": "main", "error.type": "404"})
    request.resource_spans[0].scope_spans[0].spans[0].status.code = WireStatus.STATUS_CODE_ERROR
    told(post(room, request, key=started.token))
    trace = room.trace(started)
    assert trace.calls == [] and [span.kind for span in trace.spans] == ["call"]
    assert "call" not in trace.spans[0].attributes


def test_two_instrumentations_that_report_one_call_make_one_call(room: Room) -> None:
    started = room.start()
    request = request_with(CHAT)
    other = request.resource_spans[0].scope_spans.add()
    other.scope.name = "another"
    other.spans.add().CopyFrom(request.resource_spans[0].scope_spans[0].spans[0])
    other.spans[0].span_id = SPAN
    told(post(room, request, key=started.token))
    trace = room.trace(started)
    assert len(trace.calls) == 1 and [span.attributes["call"] for span in trace.spans] == [trace.calls[0].id] * 2


@pytest.mark.parametrize(
    ("body", "media", "coding", "status"),
    [
        (b"\xff\xff", PROTOBUF, None, 400),
        (b"{", "application/json", None, 400),
        (b"[1]", "application/json", None, 400),
        (b'{"resourceSpans": 3}', "application/json", None, 400),
        (b"[" * 5000 + b"]" * 5000, "application/json", None, 400),
        (b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"no hex"}]}]}]}', "application/json", None, 400),
        (b"not gzip", PROTOBUF, "gzip", 400),
        (gzip.compress(b"x" * 100, mtime=0)[:-12], PROTOBUF, "gzip", 400),
        (b"", "text/plain", None, 415),
        (b"", PROTOBUF, "br", 415),
    ],
)
def test_bad_content_is_told_in_the_encoding_of_the_request(
    room: Room, body: bytes, media: str, coding: str | None, status: int
) -> None:
    started = room.start()
    answer = post(room, body, key=started.token, media=media, coding=coding)
    assert answer.status == status
    if media == PROTOBUF:
        assert Status.FromString(answer.raw).message
    else:
        assert answer.json["message"]
    assert room.trace(started).spans == []


def test_large_bodies_are_refused_before_they_are_held(tmp_path: Path) -> None:
    with gateway_room(tmp_path, {"gateway": {"max_body_bytes": 100_000}}) as room:
        started = room.start()
        assert post(room, b"x" * 200_000, key=started.token).status == 413
        bomb = gzip.compress(b"\0" * 50_000_000, 9, mtime=0)
        assert len(bomb) < 100_000
        answer = post(room, bomb, key=started.token, coding="gzip")
        assert answer.status == 413 and "after decompression" in Status.FromString(answer.raw).message
        many = gzip.compress(b"\0" * 60_000, mtime=0) * 2
        assert post(room, many, key=started.token, coding="gzip").status == 413


def test_more_spans_than_a_request_may_have_are_refused_together(room: Room) -> None:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for _ in range(MAX_SPANS + 1):
        spans.add()
    answer = post(room, request, key=room.start().token)
    assert answer.status == 400 and str(MAX_SPANS) in Status.FromString(answer.raw).message


def test_who_may_send_spans(room: Room) -> None:
    one, other = room.start(), room.start()
    request = request_with({"x": 1})
    assert post(room, request, key=None).status == 401
    assert post(room, request, key="lk-unknown").status == 401
    assert post(room, request, key=one.token, path=path_of(other)).status == 403
    missing = "/proxy/rollout/nobody/attempt/0/v1/traces"
    assert post(room, request, key=room.gateway.admin_key, path=missing).status == 404
    ended = {"status": {"state": "succeeded"}}
    assert room.admin("PATCH", f"/api/rollouts/{one.rollout.id}", ended).status == 200
    assert post(room, request, key=one.token).status == 409
    assert room.trace(one).spans == [] and room.trace(other).spans == []


def test_the_administrators_spans_name_their_attempt(room: Room) -> None:
    one, other = room.start(), room.start()
    request = request_with(
        {"leyden.rollout": one.rollout.id, "leyden.attempt": one.attempt.id},
        {"agentlightning.rollout_id": other.rollout.id, "agentlightning.attempt_id": other.attempt.id},
        {"leyden.rollout": "nobody", "leyden.attempt": "0"},
        {"x": 1},
    )
    answer = told(post(room, request, key=room.gateway.admin_key))
    assert answer.partial_success.rejected_spans == 2
    assert "no attempt is named" in answer.partial_success.error_message
    assert len(room.trace(one).spans) == len(room.trace(other).spans) == 1


def test_a_claim_to_be_a_captured_call_is_believed_only_where_it_can_be_true(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="hello")
    started = room.start()
    answer = room.chat(started, {"model": "main", "messages": [{"role": "user", "content": "hi"}]})
    response_id = answer.json["id"]
    now_ns = time.time_ns()

    def send(text: str, at_ns: int, **more: Any) -> None:
        said = [{"role": "assistant", "parts": [{"type": "text", "content": text}]}]
        told_attributes = {**CHAT, "gen_ai.request.model": "main", "gen_ai.output.messages": json.dumps(said), **more}
        told_attributes.pop("gen_ai.usage.output_tokens")
        request = request_with({k: v for k, v in told_attributes.items() if v is not None})
        span = request.resource_spans[0].scope_spans[0].spans[0]
        span.start_time_unix_nano, span.end_time_unix_nano = at_ns, at_ns
        told(post(room, request, key=started.token))

    send("hello", now_ns, **{"gen_ai.response.id": response_id})
    assert len(room.calls(started)) == 1
    send("something else", now_ns, **{"gen_ai.response.id": response_id})
    assert len(room.calls(started)) == 2
    send("hello", now_ns - 3600 * 10**9, **{"gen_ai.response.id": response_id})
    assert len(room.calls(started)) == 3
    send("hello", now_ns + 10**6, **{"gen_ai.response.id": None})
    assert len(room.calls(started)) == 4, "its scope has claimed that call already"
