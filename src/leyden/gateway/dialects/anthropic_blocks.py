"""Content blocks of the Messages API to messages for an engine, and back. Pure.

A tool_use block carries its arguments as an object, where the engine wrote them as text. `exact` puts the
engine's own text back where a plain rendering of the object would give another one.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from leyden.base.errors import RequestRefused
from leyden.gateway.dialects.base import Body
from leyden.gateway.dialects.chat_engine import REASONING_FIELDS, image_part, joined, reasoning_of

INVALID = "INVALID_JSON"
"""Key under which arguments that are no JSON object reach a harness; Anthropic's own name for it."""
EXACT = "leyden_arguments"
"""Field of an answer with the text of arguments whose object alone does not give it back."""
MAX_EXACT_INT = 2**53
"""Whole numbers from here on change when a program in JavaScript reads and writes them."""
SEALED = ("thinking", "redacted_thinking")
"""Blocks that only the provider which wrote them can check; one of ours has the engine's field as its signature."""
_IGNORED = frozenset({"type", "cache_control"})


class Conversation:
    """Messages that grow block by block."""

    def __init__(self) -> None:
        self.messages: list[Body] = []
        """For the engine."""
        self.images: str | None = None
        """Where the last image is."""
        self.errors = False
        """Whether a tool_result says `is_error`, for which engines have no field."""
        self.sealed = False
        """Whether a turn holds redacted thinking, which no engine can read."""

    @property
    def rewrites(self) -> tuple[str, ...]:
        """What engines have no field for."""
        said = {"is_error": self.errors, "redacted_thinking": self.sealed}
        return tuple(name for name, there in said.items() if there)

    def system(self, given: Any) -> None:
        """The `system` field. Raises RequestRefused."""
        content = given if isinstance(given, str) else joined(self._parts(given, "system", images=False))
        if content:
            self.messages.append({"role": "system", "content": content})

    def add(self, message: Any, where: str) -> None:
        """One message of the harness. Raises RequestRefused that names the block it cannot take."""
        role = message.get("role") if isinstance(message, dict) else message
        if not isinstance(message, dict) or role not in ("user", "assistant"):
            raise RequestRefused(
                f"{where} has role {role!r}", field=f"{where}.role",
                hint="use user or assistant; instructions belong into the field system",
            )  # fmt: skip
        content = message.get("content")
        if not isinstance(content, str | list):
            raise RequestRefused(
                f"{where}.content is a {type(content).__name__}", field=f"{where}.content",
                hint="send a string or a list of blocks",
            )  # fmt: skip
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if role == "user":
            self._user(blocks, f"{where}.content")
        else:
            self._assistant(blocks, f"{where}.content")

    def _user(self, blocks: Sequence[Any], where: str) -> None:
        parts: list[Body] = []
        for index, block in enumerate(blocks):
            if isinstance(block, dict) and block.get("type") == "tool_result":
                self._flush(parts)
                self._result(block, f"{where}[{index}]")
            else:
                parts += self._parts([block], where, first=index)
        self._flush(parts, always=not blocks)

    def _flush(self, parts: list[Body], always: bool = False) -> None:
        if parts or always:
            self.messages.append({"role": "user", "content": joined(parts) or ""})
        parts.clear()

    def _result(self, block: Body, where: str) -> None:
        _only(block, ("tool_use_id", "content", "is_error"), where)
        self.errors = self.errors or bool(block.get("is_error"))
        given = block.get("content")
        if not isinstance(block.get("tool_use_id"), str) or not isinstance(given, str | list | None):
            raise RequestRefused(
                f"{where} needs tool_use_id, and content that is a string or a list of blocks", field=where,
                hint="send the id of the tool_use block that it answers",
            )  # fmt: skip
        content = joined(self._parts(given, f"{where}.content")) if isinstance(given, list) else given
        self.messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content or ""})

    def _assistant(self, blocks: Sequence[Any], where: str) -> None:
        turn: Body = {"role": "assistant", "content": None}
        for index, block in enumerate(blocks):
            field = f"{where}[{index}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "text" and isinstance(block.get("text"), str):
                turn["content"] = (turn["content"] or "") + block["text"]
            elif kind == "thinking" and isinstance(block.get("thinking"), str):
                signature = block.get("signature")
                name = signature if signature in REASONING_FIELDS else REASONING_FIELDS[0]
                turn[name] = turn.get(name, "") + block["thinking"]
            elif kind == "redacted_thinking" and isinstance(block.get("data"), str):
                self.sealed = True
            elif kind == "tool_use":
                turn.setdefault("tool_calls", []).append(_call(block, field))
            else:
                raise RequestRefused(
                    f"{field} is of type {kind!r}, which is not supported or incomplete", field=field,
                    hint="an assistant's blocks are of type text, thinking, redacted_thinking and tool_use",
                )  # fmt: skip
        self.messages.append(turn)

    def _parts(self, blocks: Any, where: str, *, images: bool = True, first: int = 0) -> list[Body]:
        if not isinstance(blocks, list):
            raise RequestRefused(
                f"{where} is a {type(blocks).__name__}", field=where, hint="send a string or a list of text blocks"
            )
        parts: list[Body] = []
        for index, block in enumerate(blocks, first):
            field = f"{where}[{index}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "text" and isinstance(block.get("text"), str):
                _only(block, ("text", "citations"), field)
                parts.append({"type": "text", "text": block["text"]})
            elif kind == "image" and images:
                parts.append(_image(block, field))
                self.images = field
            else:
                raise RequestRefused(
                    f"{field} is of type {kind!r}, which is not supported", field=field,
                    hint='send {"type": "text", "text": "..."}',
                )  # fmt: skip
        return parts


def _only(block: Body, known: Sequence[str], where: str) -> None:
    for key, value in block.items():
        if key not in known and key not in _IGNORED and value is not None:
            raise RequestRefused(f"{where}.{key} is not supported", field=f"{where}.{key}", hint=f"leave {key} out")


def _image(block: Body, field: str) -> Body:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "base64":
        return image_part(f"data:{source.get('media_type')};base64,{source.get('data')}", field)
    if isinstance(source, dict) and kind == "url":
        return image_part(source.get("url"), field)
    raise RequestRefused(
        f"{field} has a source of type {kind!r}", field=field, hint="send a source of type base64 or url"
    )


def _call(block: Body, where: str) -> Body:
    given = block.get("input")
    texts = (block.get("id"), block.get("name"))
    if not all(isinstance(text, str) and text for text in texts) or not isinstance(given, dict):
        raise RequestRefused(
            f"{where} needs id, name and input, an object", field=where, hint="send the block as it was answered"
        )
    return {"id": block["id"], "type": "function", "function": {"name": block["name"], "arguments": plain(given)}}


def plain(value: object) -> str:
    """Arguments as text, as engines render them that parse what they sampled."""
    return json.dumps(value, ensure_ascii=False)


def read_arguments(text: str) -> Body:
    """Arguments as an object; what is none is put under `INVALID`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID: text}


def exact_texts(message: Mapping[str, Any]) -> dict[str, Sequence[tuple[Any, str]]]:
    """By id of a call: (arguments, their text), where the text is not what `plain` gives after a journey through
    a harness."""
    kept: dict[str, Sequence[tuple[Any, str]]] = {}
    for index, call in enumerate(message.get("tool_calls") or ()):
        text = (call.get("function") or {}).get("arguments") or ""
        value = read_arguments(text)
        if plain(value) != text or not _travels(value):
            kept[id_of(call, index)] = [(value, text)]
    return kept


def stored_texts(response: Mapping[str, Any] | None) -> dict[str, Sequence[tuple[Any, str]]]:
    """What `exact_texts` gave for an answer that was recorded as `response`."""
    kept = (response or {}).get(EXACT)
    if not isinstance(kept, dict):
        return {}
    return {str(name): [(read_arguments(text), text) for text in texts] for name, texts in kept.items()}


def with_exact(messages: Sequence[Body], texts: Mapping[str, Sequence[tuple[Any, str]]]) -> list[Body]:
    """The messages with the engine's own text of arguments that came back unchanged."""
    return [_with_exact(message, texts) if "tool_calls" in message else message for message in messages]


def _with_exact(message: Body, texts: Mapping[str, Sequence[tuple[Any, str]]]) -> Body:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        value = json.loads(function["arguments"])
        for known, text in texts.get(call["id"], ()):
            if known == value:
                function = {**function, "arguments": text}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _travels(value: Any) -> bool:
    """Whether programs in other languages give it back as it was: no fractions, large numbers, or names that are
    numbers."""
    if isinstance(value, dict):
        return all(not name.isdigit() and _travels(item) for name, item in value.items())
    if isinstance(value, list):
        return all(map(_travels, value))
    if isinstance(value, int):
        return abs(value) < MAX_EXACT_INT
    return not isinstance(value, float)


def id_of(call: Mapping[str, Any], index: int) -> str:
    """Id of a tool call; engines give one, and where not, its place is one."""
    return str(call.get("id") or f"call_{index}")


def blocks_of(message: Mapping[str, Any]) -> list[Body]:
    """What an engine said as blocks: thinking, text, tool_use. The signature says under which name the engine
    gives reasoning, so that it gets it back so; blocks that a provider signed are given as they came."""
    if message.get("content_blocks"):
        return list(message["content_blocks"])
    blocks: list[Body] = list(message.get("thinking_blocks") or ())
    name, reasoning = reasoning_of(message)
    if reasoning and not blocks:
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": name})
    content, calls = message.get("content"), message.get("tool_calls") or ()
    if content or (content is not None and not calls):
        blocks.append({"type": "text", "text": content})
    for index, call in enumerate(calls):
        function = call.get("function") or {}
        given = read_arguments(function.get("arguments") or "")
        blocks.append(
            {"type": "tool_use", "id": id_of(call, index), "name": function.get("name") or "", "input": given}
        )
    return blocks
