"""Our traces as OTLP: one OTLP trace per attempt, with a span for the attempt, for every call and for every span.

Calls are written by the GenAI semantic conventions, so that any viewer of them shows prompt, answer, tools and usage.
Token ids and log-probabilities are not written: `leyden export` has a form for them. What the store has beside that is
written as attributes `leyden.*`, by which the import gives back the same records.
"""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

import leyden
from leyden.base.records import Call, Reward, Span, Trace, to_json
from leyden.traces.telemetry.base import SAMPLING, text_of
from leyden.traces.telemetry.bodies import said_in, spoken_in, tools_in
from leyden.traces.telemetry.meaning import EXPORT_SCOPE, OTEL, RECORD, REWARD
from leyden.traces.telemetry.wire import add_attributes, nanoseconds

_RECORDED_REASON = {"tool_calls": "tool_call"}
"""Finish reasons that the convention has other words for."""


def request_of(traces: Iterable[Trace]) -> ExportTraceServiceRequest:
    """Traces as one request. Attempts that never began (number 0) have nothing to tell and are left out."""
    request = ExportTraceServiceRequest()
    for trace in traces:
        if not trace.attempt.id:
            continue
        resource = request.resource_spans.add()
        add_attributes(resource.resource.attributes, {
            "service.name": "leyden", "service.version": leyden.__version__, "leyden.rollout": trace.rollout.id,
            "leyden.attempt": trace.attempt.id,
        })  # fmt: skip
        scope = resource.scope_spans.add()
        scope.scope.name, scope.scope.version = EXPORT_SCOPE, leyden.__version__
        _Writer(trace, scope.spans).write()
    return request


class _Writer:
    """Writes one trace."""

    def __init__(self, trace: Trace, spans: Any) -> None:
        self._trace = trace
        self._spans = spans
        self._trace_id = digest(trace.attempt.id, 16)
        self._root = digest(trace.attempt.id, 8)
        self._by_call: dict[str | None, list[Reward]] = {}
        for reward in trace.rewards:
            self._by_call.setdefault(reward.call_id, []).append(reward)
        # Spans that came by OTLP had parents among each other; those relations are kept.
        self._by_otel = {span.attributes[OTEL].get("span_id"): span.id for span in trace.spans if _has_otel(span)}

    def write(self) -> None:
        """Every span of the trace."""
        self._attempt()
        for call in self._trace.calls:
            self._call(call)
        for span in self._trace.spans:
            self._span(span)

    def _add(self, record: str, record_id: str, name: str, start_s: float, end_s: float) -> WireSpan:
        wire: WireSpan = self._spans.add(trace_id=self._trace_id, name=name, kind=WireSpan.SPAN_KIND_INTERNAL)
        wire.span_id = self._root if record == "attempt" else digest(record_id, 8)
        if record != "attempt":
            wire.parent_span_id = self._root
        wire.start_time_unix_nano, wire.end_time_unix_nano = nanoseconds(start_s), nanoseconds(end_s)
        add_attributes(wire.attributes, {RECORD: record})
        return wire

    def _attempt(self) -> None:
        attempt, rollout = self._trace.attempt, self._trace.rollout
        last = [call.started_at + call.latency_ms / 1000 for call in self._trace.calls]
        ended_at = attempt.ended_at or max([attempt.started_at, *last])
        wire = self._add("attempt", attempt.id, f"attempt {attempt.number}", attempt.started_at, ended_at)
        told = {
            "gen_ai.operation.name": "invoke_agent", "leyden.task": rollout.task.id, "leyden.split": rollout.task.split,
            "leyden.outcome": attempt.outcome and str(attempt.outcome), "leyden.total_reward": rollout.reward,
            "leyden.diagnosis": attempt.diagnosis, "leyden.group": rollout.group_id, "leyden.run": rollout.run_id,
        }  # fmt: skip
        add_attributes(wire.attributes, {key: value for key, value in told.items() if value is not None})
        if attempt.outcome is not None and attempt.outcome != "completed":
            wire.status.code, wire.status.message = Status.STATUS_CODE_ERROR, attempt.detail
        ours = {call.id for call in self._trace.calls}
        self._rewards(wire, [r for call_id, group in self._by_call.items() if call_id not in ours for r in group])

    def _call(self, call: Call) -> None:
        ended_at = call.started_at + call.latency_ms / 1000
        wire = self._add("call", call.id, f"chat {call.alias}", call.started_at, ended_at)
        write_call(wire, call)
        self._rewards(wire, self._by_call.get(call.id, ()), call.id)

    def _span(self, span: Span) -> None:
        ended_at = span.started_at if span.ended_at is None else span.ended_at
        wire = self._add("span", span.id, span.name, span.started_at, ended_at)
        told: dict[str, Any] = {"leyden.span": span.id, "leyden.kind": span.kind, "leyden.attributes": span.attributes}
        if span.ended_at is None:
            told["leyden.open"] = True
        if span.kind == "tool":
            told |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": span.name}
        add_attributes(wire.attributes, told)
        if _has_otel(span):
            parent = self._by_otel.get(span.attributes[OTEL].get("parent_span_id"))
            if parent is not None and parent != span.id:
                wire.parent_span_id = digest(parent, 8)

    @staticmethod
    def _rewards(wire: WireSpan, rewards: Iterable[Reward], of_call: str | None = None) -> None:
        """Write rewards into a span; those in the span of their call need not name it."""
        for reward in rewards:
            event = wire.events.add(name=REWARD, time_unix_nano=nanoseconds(reward.created_at))
            told = {"name": reward.name, "value": reward.value, "source": reward.source}
            named = {} if reward.call_id == of_call else {"call": reward.call_id}
            add_attributes(event.attributes, told | named)


def write_call(wire: WireSpan, call: Call) -> None:
    """What the convention says of a call, into a span that has ids, name and times."""
    wire.kind = WireSpan.SPAN_KIND_CLIENT
    add_attributes(wire.attributes, _about(call))
    add_attributes(wire.attributes, _content(call))
    if call.status != "ok":
        wire.status.code, wire.status.message = Status.STATUS_CODE_ERROR, call.error or call.status
        add_attributes(wire.attributes, {"error.type": str(call.http_status or call.status)})


def _about(call: Call) -> dict[str, Any]:
    """What is known of a call beside its content."""
    response = call.response or {}
    usage = response.get("usage") or {}
    told: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion" if "prompt" in call.request else "chat",
        "gen_ai.provider.name": "leyden", "gen_ai.request.model": call.alias, "gen_ai.response.model": call.policy,
        "gen_ai.response.id": response.get("id"),
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens", usage.get("input_tokens")),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens", usage.get("output_tokens")),
        "gen_ai.request.stop_sequences": call.sampling.get("stop"), "leyden.call": call.id,
        "leyden.policy": call.policy, "leyden.policy_version": call.policy_version, "leyden.dialect": call.dialect,
        "leyden.provenance": str(call.provenance), "leyden.status": call.status,
    }  # fmt: skip
    told |= {f"gen_ai.request.{name}": call.sampling.get(name) for name in SAMPLING}
    return {key: value for key, value in told.items() if value is not None}


def _content(call: Call) -> dict[str, Any]:
    """Prompt, answers and tools, as JSON text: what every version of the convention allows."""
    read, said = spoken_in(call.request), said_in(call.response or {})
    answers = [
        {**_parts(message), "finish_reason": _RECORDED_REASON.get(reason, reason)} for message, reason in said
    ] or [
        {"role": "assistant", "parts": [_text(choice.text)], "finish_reason": choice.finish_reason}
        for choice in call.choices
        if choice.text
    ]
    told = {
        "gen_ai.input.messages": [_parts(message) for message in read],
        "gen_ai.output.messages": answers,
        "gen_ai.tool.definitions": tools_in(call.request),
    }
    reasons = [answer["finish_reason"] for answer in answers]
    about: dict[str, Any] = {"gen_ai.response.finish_reasons": reasons} if reasons else {}
    return about | {key: to_json(value) for key, value in told.items() if value}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}


def _parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of Chat Completions as one of the convention."""
    parts: list[Any] = []
    content = message.get("content")
    if message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": message["reasoning_content"]})
    if message.get("role") == "tool":
        response = content if isinstance(content, str) else text_of(content)
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id", ""), "response": response})
    elif isinstance(content, str):
        parts += [_text(content)] if content or not message.get("tool_calls") else []
    elif isinstance(content, list):
        parts += [_text(p["text"]) if isinstance(p, dict) and p.get("type") == "text" else p for p in content]
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append({
            "type": "tool_call", "id": call.get("id", ""), "name": function.get("name", ""),
            "arguments": function.get("arguments", ""),
        })  # fmt: skip
    named = {"name": message["name"]} if isinstance(message.get("name"), str) else {}
    return {"role": message.get("role", "user"), **named, "parts": parts}


def _has_otel(span: Span) -> bool:
    return isinstance(span.attributes.get(OTEL), Mapping)


def digest(text: str, num_bytes: int) -> bytes:
    """An id of OTLP that follows from one of ours."""
    return blake2b(text.encode(), digest_size=num_bytes).digest()
