"""Tool calls as the model asked for them, in any dialect, and what is wrong with them.

Promises: every tool call of an answer is found, whatever the dialect; a fault is named only when the request's own
declaration of tools shows it. Does not run anything, and knows only the part of JSON Schema that tool declarations
use (`type`, `properties`, `required`, `enum`, `additionalProperties: false`); other keywords are not judged.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyden.base.records import Call, Trace

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,), "array": (list,),
    "object": (Mapping,), "null": (type(None),),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call that a model asked for."""

    id: str
    """As the answer named it; empty if it did not."""
    name: str
    """Of the tool."""
    arguments: Any
    """Parsed; the text itself where it is no JSON."""
    fault: str | None
    """What is wrong with it by the request's own declaration, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What the harness said that a tool returned."""

    id: str
    """Of the tool call."""
    text: str
    """The result as text."""
    is_error: bool
    """Whether the harness marked it as an error (only some dialects can)."""


def tool_calls(call: Call) -> list[ToolCall]:
    """The tool calls in the answer of one model call."""
    declared = dict(_declared(call.request.get("tools") or ()))
    return [
        ToolCall(id=str(identity), name=name, arguments=_parsed(raw), fault=_fault(name, _parsed(raw), declared))
        for identity, name, raw in _asked(call.response or {})
    ]


def num_wrong(trace: Trace) -> int:
    """Tool calls of a trace that their declaration does not allow."""
    return sum(asked.fault is not None for call in trace.calls for asked in tool_calls(call))


def tool_results(trace: Trace) -> list[ToolResult]:
    """The results that the harness gave back, each once, in order: requests repeat the conversation so far."""
    found: dict[str, ToolResult] = {}
    for call in trace.calls:
        for number, result in enumerate(_results(call.request)):
            found.setdefault(result.id or f"{number}:{result.text}", result)
    return list(found.values())


def _asked(response: Mapping[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    for choice in _mappings(response.get("choices")):
        message = choice.get("message")
        for one in _mappings(message.get("tool_calls") if isinstance(message, Mapping) else None):
            function = one.get("function")
            if isinstance(function, Mapping):
                yield one.get("id", ""), str(function.get("name", "")), function.get("arguments")
    for item in _mappings(response.get("output")):
        if item.get("type") == "function_call":
            yield item.get("call_id", ""), str(item.get("name", "")), item.get("arguments")
    for block in _mappings(response.get("content")):
        if block.get("type") == "tool_use":
            yield block.get("id", ""), str(block.get("name", "")), block.get("input")


def _results(request: Mapping[str, Any]) -> Iterator[ToolResult]:
    for message in _mappings(request.get("messages")):
        if message.get("role") == "tool":
            yield ToolResult(
                id=str(message.get("tool_call_id", "")), text=_text(message.get("content")), is_error=False
            )
        for block in _mappings(message.get("content")):
            if block.get("type") == "tool_result":
                yield ToolResult(
                    id=str(block.get("tool_use_id", "")),
                    text=_text(block.get("content")),
                    is_error=block.get("is_error") is True,
                )
    for item in _mappings(request.get("input")):
        if item.get("type") == "function_call_output":
            yield ToolResult(id=str(item.get("call_id", "")), text=_text(item.get("output")), is_error=False)


def _declared(tools: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for tool in _mappings(tools):
        inner = tool.get("function")
        one = inner if isinstance(inner, Mapping) else tool
        schema = one.get("parameters", one.get("input_schema"))
        if isinstance(one.get("name"), str):
            yield one["name"], schema if isinstance(schema, Mapping) else {}


def _parsed(raw: Any) -> Any:
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw) if raw.strip() else {}
    except (ValueError, RecursionError):  # a model may write anything
        return raw


def _fault(name: str, arguments: Any, declared: Mapping[str, Mapping[str, Any]]) -> str | None:
    if name not in declared:
        return f"there is no tool {name!r}"
    if not isinstance(arguments, Mapping):
        return "its arguments are no JSON object"
    return _mismatch(arguments, declared[name])


def _mismatch(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        if name not in arguments:
            return f"argument {name!r} is missing"
    for name, value in arguments.items():
        declared = properties.get(name)
        if not isinstance(declared, Mapping):
            if schema.get("additionalProperties") is False and name not in properties:
                return f"argument {name!r} is not declared"
            continue
        if not _fits(value, declared.get("type")):
            return f"argument {name!r} is {value!r}, not {declared['type']}"
        choices = declared.get("enum")
        if isinstance(choices, list) and value not in choices:
            return f"argument {name!r} is {value!r}, none of {choices}"
    return None


def _fits(value: Any, kind: Any) -> bool:
    kinds = kind if isinstance(kind, list) else [kind]
    known = [_TYPES[one] for one in kinds if isinstance(one, str) and one in _TYPES]
    if not known:
        return True
    # A bool is an int to Python, and not to JSON; a whole float is an integer to JSON.
    if isinstance(value, bool):
        return any(bool in types for types in known)
    if isinstance(value, float) and value.is_integer():
        return any(int in types for types in known)
    return any(isinstance(value, types) for types in known)


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield from (item for item in value if isinstance(item, Mapping))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        return _text(content.get("text", json.dumps(dict(content), default=str)))
    return "\n".join(_text(part) for part in content) if isinstance(content, list) else ""
