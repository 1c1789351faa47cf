"""OpenInference: `openinference.span.kind`, `llm.*`, and numbered messages below `llm.input_messages`."""

from collections.abc import Mapping
from typing import Any

from leyden.traces.telemetry.base import (
    NO_MODEL,
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

_NOT_SAMPLING = frozenset({"model", "messages", "prompt", "input", "tools", "stream", "stream_options", "functions"})
_CONTENT = ("llm.input_messages.", "llm.output_messages.", "llm.prompts.", "llm.choices.", "llm.tools.")


def _kind(span: Report) -> str:
    return str(span.attributes.get("openinference.span.kind", "")).upper()


def is_call(span: Report) -> bool:
    """Whether the span is a model call."""
    return _kind(span) == "LLM"


def read_call(span: Report) -> ReportedCall:
    """The call that the span is."""
    attributes = span.attributes
    parameters = from_json(attributes.get("llm.invocation_parameters"))
    parameters = parameters if isinstance(parameters, dict) else {}
    answer = from_json(attributes.get("output.value"))
    answer = answer if isinstance(answer, dict) else {}
    prompts = in_order(nested(attributes, "llm.prompts."))
    model = attributes.get("llm.model_name") or parameters.get("model")
    response_id = answer.get("id")
    return ReportedCall(
        model=as_text(model) if model else NO_MODEL,
        completion=bool(prompts),
        messages=_prompts(prompts) if prompts else _messages(attributes, "llm.input_messages."),
        tools=[
            from_json((one.get("tool") or {}).get("json_schema"))
            for one in in_order(nested(attributes, "llm.tools."))
            if isinstance(one.get("tool"), dict)
        ],
        sampling={name: value for name, value in parameters.items() if name not in _NOT_SAMPLING},
        choices=_choices(attributes, answer, bool(prompts)),
        usage=usage_of(
            attributes.get("llm.token_count.prompt"),
            attributes.get("llm.token_count.completion"),
            attributes.get("llm.token_count.total"),
        ),
        response_id=response_id if isinstance(response_id, str) and response_id else None,
    )


def _prompts(prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    texts = [one["prompt"].get("text") for one in prompts if isinstance(one.get("prompt"), dict)]
    return [{"role": "user", "content": as_text(text)} for text in texts if text is not None]


def _messages(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    numbered = in_order(nested(attributes, prefix))
    return [_message(one["message"]) for one in numbered if isinstance(one.get("message"), dict)]


def _message(one: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": as_text(one.get("role") or "user")}
    parts = [part["message_content"] for part in in_order(one.get("contents")) if _is_branch(part, "message_content")]
    if parts:
        only_text = len(parts) == 1 and "text" in parts[0]
        message["content"] = as_text(parts[0]["text"]) if only_text else parts
    else:
        content = one.get("content")
        message["content"] = None if content is None else as_text(content)
    calls = [call["tool_call"] for call in in_order(one.get("tool_calls")) if _is_branch(call, "tool_call")]
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    for name in ("tool_call_id", "name"):
        if one.get(name) is not None:
            message[name] = as_text(one[name])
    return message


def _is_branch(tree: Mapping[str, Any], name: str) -> bool:
    return isinstance(tree.get(name), dict)


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"] if _is_branch(call, "function") else {}
    return tool_call(call.get("id"), function.get("name"), function.get("arguments"))


def _choices(attributes: Mapping[str, Any], answer: Mapping[str, Any], completion: bool) -> list[Said]:
    if completion:
        numbered = in_order(nested(attributes, "llm.choices."))
        texts = [one["completion"].get("text") for one in numbered if _is_branch(one, "completion")]
        messages = [{"role": "assistant", "content": as_text(text)} for text in texts if text is not None]
    else:
        messages = [{**one, "role": "assistant"} for one in _messages(attributes, "llm.output_messages.")]
    given = answer.get("choices")
    listed = given if isinstance(given, list) else []
    reasons = [reason_of(one.get("finish_reason")) if isinstance(one, dict) else "" for one in listed]
    reasons = reasons or [reason_of(attributes.get("llm.finish_reason"))]
    return [
        Said(message=message, finish_reason=reasons[index] if index < len(reasons) else "")
        for index, message in enumerate(messages)
    ]


def holds_content(name: str) -> bool:
    """Whether an attribute or event of this name is told by the call."""
    return name in ("input.value", "output.value", "llm.invocation_parameters") or name.startswith(_CONTENT)


def read_tool(span: Report) -> dict[str, Any] | None:
    """The use of a tool, if the span is one."""
    if _kind(span) != "TOOL":
        return None
    attributes = span.attributes
    return {
        "name": attributes.get("tool.name") or span.name,
        "arguments": attributes.get("tool.parameters", attributes.get("input.value")),
        "result": attributes.get("output.value"),
        "tool_call_id": attributes.get("tool_call.id", attributes.get("tool.id")),
    }


OPENINFERENCE = Convention(
    name="openinference", is_call=is_call, read_call=read_call, holds_content=holds_content, read_tool=read_tool
)
