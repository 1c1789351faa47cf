"""Items of the Responses API to messages for an engine, and back. Pure.

One conversation has one form for the engine, whatever its dialect: consecutive reasoning, message and
function_call items are one assistant turn, arguments of calls keep their text to the byte, a single text is a
string and several are a list of parts. The role `developer` becomes `system`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from leyden.base.errors import RequestRefused
from leyden.gateway.dialects.base import Body
from leyden.gateway.dialects.chat_engine import REASONING_FIELDS, image_part, joined

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ITEMS = "message, function_call, function_call_output and reasoning"
_NAMED = {"rsn_": REASONING_FIELDS[1], "rs_": REASONING_FIELDS[0]}
"""Prefix of a reasoning item's id to the name under which the engine gave it, so that it gets it back so."""


class Conversation:
    """Messages that grow item by item."""

    def __init__(self) -> None:
        self.messages: list[Body] = []
        """For the engine."""
        self.images: str | None = None
        """Where the last image is."""
        self.developer = False
        """Whether a message of role `developer` became one of role `system`."""
        self._turn: Body | None = None

    def add(self, items: Sequence[Any], where: str = "input") -> None:
        """Take items in. Raises RequestRefused that names the one it cannot take."""
        for index, item in enumerate(items):
            self._add(item, f"{where}[{index}]")

    def _add(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise RequestRefused(f"{where} is no object", field=where, hint=f"send items of type {_ITEMS}")
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(item, where)
        elif kind == "function_call":
            self._call(item, where)
        elif kind == "function_call_output":
            self._output(item, where)
        elif kind == "reasoning":
            self._reasoning(item, where)
        else:
            raise RequestRefused(
                f"{where} is of type {kind!r}, which is not supported", field=where,
                hint=f"items of type {_ITEMS} are",
            )  # fmt: skip

    def _message(self, item: Body, where: str) -> None:
        asked = item.get("role")
        role = _ROLES.get(asked) if isinstance(asked, str) else None
        if role is None:
            raise RequestRefused(
                f"{where} has role {asked!r}", field=f"{where}.role", hint=f"use one of {', '.join(_ROLES)}"
            )
        self.developer = self.developer or asked == "developer"
        content = item.get("content")
        if not isinstance(content, str | list):
            raise RequestRefused(
                f"{where}.content is a {type(content).__name__}", field=f"{where}.content",
                hint="send a string or a list of parts",
            )  # fmt: skip
        if role != "assistant":
            text = content if isinstance(content, str) else joined(self._parts(content, f"{where}.content"))
            self._say({"role": role, "content": text if text is not None else ""})
            return
        text = content if isinstance(content, str) else _said(content, f"{where}.content")
        turn = self._assistant(fresh=lambda turn: turn["content"] is not None)
        turn["content"] = text

    def _call(self, item: Body, where: str) -> None:
        for key in ("call_id", "name", "arguments"):
            if not isinstance(item.get(key), str):
                raise RequestRefused(
                    f"{where}.{key} is {item.get(key)!r}; it must be a string", field=f"{where}.{key}",
                    hint="send the item as it was answered",
                )  # fmt: skip
        function = {"name": item["name"], "arguments": item["arguments"]}
        turn = self._assistant()
        turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})

    def _output(self, item: Body, where: str) -> None:
        output = item.get("output")
        if not isinstance(item.get("call_id"), str) or not isinstance(output, str | list):
            raise RequestRefused(
                f"{where} needs call_id and output, a string or a list of parts", field=where,
                hint="send the call_id of the function_call that it answers",
            )  # fmt: skip
        content = output if isinstance(output, str) else joined(self._parts(output, f"{where}.output"))
        self._say({"role": "tool", "tool_call_id": item["call_id"], "content": content if content is not None else ""})

    def _reasoning(self, item: Body, where: str) -> None:
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list) or not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts
        ):
            raise RequestRefused(
                f"{where} holds no list of texts", field=where, hint="send the item as it was answered"
            )
        text = "".join(part["text"] for part in parts)
        sealed = item.get("encrypted_content")
        if not text and isinstance(sealed, str):
            text = sealed  # as `reasoning_item` gave it
        if text:
            prefix = str(item.get("id") or "").partition("_")[0] + "_"
            turn = self._assistant(fresh=lambda turn: turn["content"] is not None or "tool_calls" in turn)
            turn[_NAMED.get(prefix, REASONING_FIELDS[0])] = text

    def _parts(self, parts: Sequence[Any], where: str) -> list[Body]:
        made: list[Body] = []
        for index, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, dict) else None
            field = f"{where}[{index}]"
            if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
                made.append({"type": "text", "text": part["text"]})
            elif kind == "input_image" and part.get("file_id") is None:
                made.append(image_part(part.get("image_url"), field, part.get("detail")))
                self.images = field
            else:
                raise RequestRefused(
                    f"{field} is of type {kind!r}, which is not supported", field=field,
                    hint='send {"type": "input_text", "text": "..."}',
                )  # fmt: skip
        return made

    def _say(self, message: Body) -> None:
        self._turn = None
        self.messages.append(message)

    def _assistant(self, fresh: Any = None) -> Body:
        """The assistant turn that goes on; a new one if there is none, or if `fresh` says that it is full."""
        if self._turn is None or (fresh is not None and fresh(self._turn)):
            turn: Body = {"role": "assistant", "content": None}
            self._say(turn)
            self._turn = turn
        return self._turn


def _said(parts: Sequence[Any], where: str) -> str:
    """The text of an assistant's message: what it sampled was one text, however it was cut into parts."""
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("output_text", "input_text", "text", "refusal") or not isinstance(text, str):
            raise RequestRefused(
                f"{where}[{index}] is of type {kind!r}, which is not supported", field=f"{where}[{index}]",
                hint='send {"type": "output_text", "text": "..."}',
            )  # fmt: skip
        texts.append(text)
    return "".join(texts)


def message_item(call_id: str, text: str, status: str, logprobs: Sequence[Body]) -> Body:
    """The text of an answer as an item."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {
        "id": f"msg_{call_id}", "type": "message", "role": "assistant", "status": status,
        "content": [part] if status != "in_progress" else [],
    }  # fmt: skip


def call_item(call_id: str, index: int, call: Mapping[str, Any], status: str) -> Body:
    """A tool call of an answer as an item."""
    function = call.get("function") or {}
    return {
        "id": f"fc_{call_id}_{index}", "type": "function_call", "call_id": call.get("id") or f"call_{index}",
        "name": function.get("name") or "", "arguments": function.get("arguments") or "", "status": status,
    }  # fmt: skip


def reasoning_item(call_id: str, name: str, text: str, status: str, sealed: bool) -> Body:
    """Reasoning of an answer as an item; `sealed` repeats it where clients without storage look for it."""
    prefix = next(prefix for prefix, field in _NAMED.items() if field == name)
    item: Body = {
        "id": f"{prefix}{call_id}", "type": "reasoning", "summary": [], "status": status,
        "content": [{"type": "reasoning_text", "text": text}] if status != "in_progress" else [],
    }  # fmt: skip
    if sealed:
        item["encrypted_content"] = text
    return item


def turn_of(output: Sequence[Body]) -> Body:
    """Items of an answer as the assistant message of an engine."""
    conversation = Conversation()
    conversation.add(output, "output")
    return conversation.messages[0] if conversation.messages else {"role": "assistant", "content": None}
