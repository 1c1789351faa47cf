"""The GenAI semantic conventions of OpenTelemetry, and those of OpenLLMetry, which share names with them.

Attributes of the request and the answer are `gen_ai.request.*`, `gen_ai.response.*`, `gen_ai.usage.*`. The content is
looked for where each generation puts it, newest first:

- attributes `gen_ai.system_instructions`, `gen_ai.input.messages`, `gen_ai.output.messages` (JSON text or values), on
  the span or on its event `gen_ai.client.inference.operation.details`;
- one event per message, `gen_ai.user.message` and so on, and `gen_ai.choice`;
- the events `gen_ai.content.prompt` and `gen_ai.content.completion`;
- numbered attributes, `gen_ai.prompt.0.content` and `gen_ai.completion.0.content` (OpenLLMetry).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from leyden.traces.telemetry.base import (
    NO_MODEL,
    SAMPLING,
    Convention,
    Report,
    ReportedCall,
    Said,
    as_text,
    from_json,
    in_order,
    nested,
    reason_of,
    tool_call,
    usage_of,
)

CALLS = ("chat", "text_completion", "generate_content", "completion")
"""Operations that are model calls. A tuple: what is looked for in it may be of any type."""
DETAILS = "gen_ai.client.inference.operation.details"
"""Event that may hold what else stands in the attributes of the span."""
_CONTENT = ("gen_ai.prompt.", "gen_ai.completion.", "llm.request.functions.", "gen_ai.content.")
_CONTENT_NAMES = frozenset(
    {"gen_ai.system_instructions", "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions"}
    | {"gen_ai.choice", "gen_ai.prompt", "gen_ai.completion", DETAILS}
    | {f"gen_ai.{role}.message" for role in ("system", "user", "assistant", "tool")}
)


def is_call(span: Report) -> bool:
    """Whether the span is a model call. Without the name of an operation, an answer or a prompt must be there."""
    attributes = span.attributes
    operation = attributes.get("gen_ai.operation.name") or attributes.get("llm.request.type")
    if operation is not None:
        return operation in CALLS
    if "gen_ai.request.model" not in attributes and "gen_ai.response.model" not in attributes:
        return False
    told = ("gen_ai.prompt.", "gen_ai.completion.", "gen_ai.usage.", "gen_ai.response.id", "gen_ai.output.messages")
    return any(key.startswith(told) for key in attributes) or any(event.name in _CONTENT_NAMES for event in span.events)


def read_call(span: Report) -> ReportedCall:
    """The call that the span is."""
    details = next((event.attributes for event in span.events if event.name == DETAILS), {})
    attributes = {**details, **span.attributes}
    operation = attributes.get("gen_ai.operation.name") or attributes.get("llm.request.type")
    reasons = attributes.get("gen_ai.response.finish_reasons")
    messages, choices = _content(span, attributes)
    if isinstance(reasons, list):
        filled = [*map(reason_of, reasons), *[""] * len(choices)]
        choices = [
            said if said.finish_reason else Said(message=said.message, finish_reason=reason)
            for said, reason in zip(choices, filled, strict=False)
        ]
    model = attributes.get("gen_ai.request.model") or attributes.get("gen_ai.response.model")
    response_id = attributes.get("gen_ai.response.id")
    return ReportedCall(
        model=as_text(model) if model else NO_MODEL,
        completion=operation in ("text_completion", "completion"),
        messages=messages,
        tools=_tools(attributes),
        sampling=_sampling(attributes),
        choices=choices,
        usage=usage_of(
            attributes.get("gen_ai.usage.input_tokens", attributes.get("gen_ai.usage.prompt_tokens")),
            attributes.get("gen_ai.usage.output_tokens", attributes.get("gen_ai.usage.completion_tokens")),
            attributes.get("gen_ai.usage.total_tokens", attributes.get("llm.usage.total_tokens")),
        ),
        response_id=response_id if isinstance(response_id, str) and response_id else None,
    )


def _sampling(attributes: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: attributes.get(f"gen_ai.request.{name}") for name in SAMPLING}
    found["stop"] = attributes.get("gen_ai.request.stop_sequences")
    found["n"] = attributes.get("gen_ai.request.choice.count")
    return {name: value for name, value in found.items() if value is not None}


def _tools(attributes: Mapping[str, Any]) -> list[Any]:
    given = from_json(attributes.get("gen_ai.tool.definitions"))
    if isinstance(given, list):
        return [_tool(tool) for tool in given]
    functions = in_order(nested(attributes, "llm.request.functions."))
    return [_tool({**tool, "parameters": from_json(tool.get("parameters"))}) for tool in functions]


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or "function" in tool or tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _content(span: Report, attributes: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Said]]:
    """(messages, answers), from the newest place that has any."""
    read: list[dict[str, Any]] = []
    system = from_json(attributes.get("gen_ai.system_instructions"))
    if system:
        read += _messages([{"role": "system", "parts": system if isinstance(system, list) else [system]}])
    read += _messages(from_json(attributes.get("gen_ai.input.messages")))
    said = _answers(from_json(attributes.get("gen_ai.output.messages")))
    if read or said:
        return read, said
    for read_one in (_from_message_events, _from_content_events):
        read, said = read_one(span)
        if read or said:
            return read, said
    prompts = in_order(nested(attributes, "gen_ai.prompt."))
    completions = in_order(nested(attributes, "gen_ai.completion."))
    return [_numbered(one) for one in prompts], [
        Said(message=_numbered({"role": "assistant", **one}), finish_reason=reason_of(one.get("finish_reason")))
        for one in completions
    ]


def _messages(given: Any) -> list[dict[str, Any]]:
    """Messages of the convention (or of an API, where an instrumentation passed those on) as messages of ours."""
    found: list[dict[str, Any]] = []
    for one in given if isinstance(given, list) else []:
        if isinstance(one, str):
            found.append({"role": "user", "content": one})
        elif isinstance(one, dict):
            found += _from_parts(one) if isinstance(one.get("parts"), list) else [dict(one)]
    return found


def _from_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One message with parts: as one message, and one more for every result of a tool."""
    content: list[Any] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    made: dict[str, Any] = {"role": as_text(message.get("role") or "user")}
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    for part in message["parts"]:
        part = {"type": "text", "content": part} if isinstance(part, str) else part
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            content.append({"type": "text", "text": as_text(part.get("content", part.get("text", "")))})
        elif kind == "tool_call":
            calls.append(tool_call(part.get("id"), part.get("name"), part.get("arguments")))
        elif kind == "tool_call_response":
            result = part.get("response", part.get("result", ""))
            results.append({"role": "tool", "tool_call_id": as_text(part.get("id") or ""), "content": as_text(result)})
        elif kind == "reasoning":
            made["reasoning_content"] = made.get("reasoning_content", "") + as_text(part.get("content", ""))
        else:
            content.append(part)
    if not content and not calls and results:
        return results
    only_text = len(content) == 1 and isinstance(content[0], dict) and content[0].get("type") == "text"
    made["content"] = content[0]["text"] if only_text else content or (None if calls else "")
    if calls:
        made["tool_calls"] = calls
    return [made, *results]


def _answers(given: Any) -> list[Said]:
    found = []
    for one in given if isinstance(given, list) else []:
        for message in _messages([one])[:1]:
            reason = one.get("finish_reason") if isinstance(one, dict) else None
            message = {key: value for key, value in message.items() if key != "finish_reason"}
            found.append(Said(message={**message, "role": "assistant"}, finish_reason=reason_of(reason)))
    return found


def _from_message_events(span: Report) -> tuple[list[dict[str, Any]], list[Said]]:
    read: list[dict[str, Any]] = []
    said: list[Said] = []
    for event in span.events:
        if event.name != "gen_ai.choice" and not (
            event.name.startswith("gen_ai.") and event.name.endswith(".message") and event.name in _CONTENT_NAMES
        ):
            continue
        body = from_json(event.attributes.get("gen_ai.event.content"))
        body = body if isinstance(body, dict) else {key: from_json(value) for key, value in event.attributes.items()}
        if event.name == "gen_ai.choice":
            message = body.get("message")
            message = message if isinstance(message, dict) else {"content": message if message else body.get("content")}
            message = {"role": "assistant", **message, **{k: body[k] for k in ("tool_calls",) if k in body}}
            said.append(Said(message=_event_message(message), finish_reason=reason_of(body.get("finish_reason"))))
        else:
            read.append(_event_message({"role": event.name.split(".")[1], **body}))
    return read, said


def _event_message(body: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": as_text(body["role"])}
    content = body.get("content")
    message["content"] = content if content is None or isinstance(content, str | list) else as_text(content)
    calls = body.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [call for call in calls if isinstance(call, dict)]
    if message["role"] == "tool":
        message["tool_call_id"] = as_text(body.get("id") or body.get("tool_call_id") or "")
    return message


def _from_content_events(span: Report) -> tuple[list[dict[str, Any]], list[Said]]:
    read: list[dict[str, Any]] = []
    said: list[Said] = []
    for event in span.events:
        if event.name == "gen_ai.content.prompt":
            given = from_json(event.attributes.get("gen_ai.prompt"))
            read += _messages(given if isinstance(given, list) else [given])
        elif event.name == "gen_ai.content.completion":
            given = from_json(event.attributes.get("gen_ai.completion"))
            said += _answers(given if isinstance(given, list) else [given])
    return read, said


def _numbered(one: Mapping[str, Any]) -> dict[str, Any]:
    """A message of numbered attributes."""
    message: dict[str, Any] = {"role": as_text(one.get("role") or "user")}
    content = from_json(one.get("content")) if str(one.get("content", ""))[:2] == "[{" else one.get("content")
    message["content"] = content if content is None or isinstance(content, list) else as_text(content)
    calls: Sequence[dict[str, Any]] = in_order(one.get("tool_calls"))
    if calls:
        message["tool_calls"] = [tool_call(c.get("id"), c.get("name"), c.get("arguments")) for c in calls]
    if "tool_call_id" in one:
        message["tool_call_id"] = as_text(one["tool_call_id"])
    return message


def holds_content(name: str) -> bool:
    """Whether an attribute or event of this name is told by the call."""
    return name in _CONTENT_NAMES or name.startswith(_CONTENT)


def read_tool(span: Report) -> dict[str, Any] | None:
    """The use of a tool, if the span is one."""
    attributes = span.attributes
    if attributes.get("gen_ai.operation.name") == "execute_tool":
        return {
            "name": attributes.get("gen_ai.tool.name") or span.name.removeprefix("execute_tool ") or span.name,
            "arguments": attributes.get("gen_ai.tool.call.arguments"),
            "result": attributes.get("gen_ai.tool.call.result"),
            "tool_call_id": attributes.get("gen_ai.tool.call.id"),
        }
    if attributes.get("traceloop.span.kind") == "tool":
        return {
            "name": attributes.get("traceloop.entity.name") or span.name,
            "arguments": attributes.get("traceloop.entity.input"),
            "result": attributes.get("traceloop.entity.output"),
        }
    return None


GENAI = Convention(
    name="gen_ai", is_call=is_call, read_call=read_call, holds_content=holds_content, read_tool=read_tool
)
