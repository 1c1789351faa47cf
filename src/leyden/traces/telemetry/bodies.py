"""Bodies of every dialect as messages of Chat Completions, for people who read traces; no body is made from them.

Read by their shape: `messages` (with or without `system`), `input` (with or without `instructions`), `prompt`; answers
with `choices`, `output` or `content`. What has no place in a message of Chat Completions stays as it is in its content.
"""

from collections.abc import Mapping
from typing import Any

from leyden.traces.telemetry.base import as_text, tool_call

Message = dict[str, Any]


def spoken_in(request: Mapping[str, Any]) -> list[Message]:
    """What the model read."""
    read: list[Message] = []
    above = [request[name] for name in ("system", "instructions") if request.get(name)]
    read += [{"role": "system", "content": _plain(text)} for text in above]
    if isinstance(request.get("messages"), list):
        for one in request["messages"]:
            if isinstance(one, Mapping):
                read += _messages(one)
    given = request.get("input", request.get("prompt"))
    if isinstance(given, str):
        read.append({"role": "user", "content": given})
    elif isinstance(given, list) and all(isinstance(item, Mapping) for item in given):
        for item in given:
            read += _item(item)
    elif isinstance(given, list) and given:
        read.append({"role": "user", "content": [{"type": "token_ids", "token_ids": given}]})
    return read


def said_in(response: Mapping[str, Any]) -> list[tuple[Message, str]]:
    """(answer, finish reason) of every choice."""
    if isinstance(response.get("choices"), list):
        found = []
        for choice in response["choices"]:
            message = choice.get("message") or {"role": "assistant", "content": choice.get("text", "")}
            found.append((dict(message), str(choice.get("finish_reason") or "")))
        return found
    if isinstance(response.get("output"), list):
        reason = str((response.get("incomplete_details") or {}).get("reason") or response.get("status") or "")
        return [(_joined([part for item in response["output"] for part in _item(item)]), reason)]
    if isinstance(response.get("content"), list):
        made = _messages({"role": "assistant", "content": response["content"]})
        return [(_joined(made), str(response.get("stop_reason") or ""))]
    return []


def tools_in(request: Mapping[str, Any]) -> list[Any]:
    """The tools a request offers, flat as the convention has them."""
    found = []
    for tool in request.get("tools") or ():
        if not isinstance(tool, Mapping):
            continue
        inner = tool.get("function")
        flat = {"type": "function", **inner} if isinstance(inner, Mapping) else dict(tool)
        if "input_schema" in flat:
            flat = {"type": "function", **{("parameters" if k == "input_schema" else k): v for k, v in flat.items()}}
        found.append(flat)
    return found


def _messages(message: Mapping[str, Any]) -> list[Message]:
    """One message of Chat Completions or of Messages; results of tools become messages of their own."""
    blocks = message.get("content")
    special = ("tool_use", "tool_result", "thinking")
    if not isinstance(blocks, list) or not any(isinstance(b, Mapping) and b.get("type") in special for b in blocks):
        return [dict(message)]
    made: Message = {"role": message.get("role", "user")}
    rest: list[Any] = []
    results: list[Message] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            made.setdefault("tool_calls", []).append(tool_call(block.get("id"), block.get("name"), block.get("input")))
        elif kind == "tool_result":
            content = _plain(block.get("content", ""))
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id", ""), "content": content})
        elif kind == "thinking":
            made["reasoning_content"] = made.get("reasoning_content", "") + as_text(block.get("thinking", ""))
        else:
            rest.append(block)
    if not rest and results and len(made) == 1:
        return results
    return [*results, made | {"content": _plain(rest) if rest else None}]


def _item(item: Any) -> list[Message]:
    """One item of a Responses conversation."""
    if not isinstance(item, Mapping):
        return []
    kind = item.get("type", "message")
    if kind == "function_call":
        call = tool_call(item.get("call_id"), item.get("name"), item.get("arguments"))
        return [{"role": "assistant", "content": None, "tool_calls": [call]}]
    if kind == "function_call_output":
        return [{"role": "tool", "tool_call_id": item.get("call_id", ""), "content": _plain(item.get("output", ""))}]
    if kind == "reasoning":
        texts = [*(item.get("summary") or ()), *(item.get("content") or ())]
        return [{"role": "assistant", "content": None, "reasoning_content": _plain(texts)}]
    return [{"role": item.get("role", "assistant"), "content": _plain(item.get("content", ""))}]


def _plain(content: Any) -> Any:
    """Content as one text where it is only text, else as a list of parts."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else as_text(content)
    parts = [
        {"type": "text", "text": part["text"]}
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        else part
        for part in content
    ]
    if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _joined(messages: list[Message]) -> Message:
    """Consecutive messages of one answer as one."""
    made: Message = {"role": "assistant", "content": None}
    for message in messages:
        for name in ("content", "reasoning_content"):
            if isinstance(message.get(name), str):
                made[name] = (made.get(name) or "") + message[name]
        if message.get("tool_calls"):
            made.setdefault("tool_calls", []).extend(message["tool_calls"])
        if isinstance(message.get("content"), list):
            made["content"] = message["content"]
    return made
