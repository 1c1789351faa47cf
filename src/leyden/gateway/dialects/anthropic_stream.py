"""Chunks of an engine to the named events of the Messages API: one block after another, each opened, grown, closed.

Text that follows a call is a block of its own in the stream; in the recorded message it stands with the text
before.
"""

from collections.abc import Callable, Mapping
from typing import Any

from leyden.base.errors import EngineError
from leyden.gateway.dialects.anthropic_blocks import id_of
from leyden.gateway.dialects.base import Body, event_bytes
from leyden.gateway.dialects.chat_engine import reasoning_of


class MessageTranslator:
    """See `base.Translator`."""

    def __init__(self, head: Callable[[Mapping[str, Any]], Body], failure: Callable[[str, str], Body]) -> None:
        self._head = head
        self._failure = failure
        self._begun = False
        self._index = -1
        self._kind: str | None = None
        self._call: int | None = None
        self._calls: set[int] = set()
        self._signature = ""

    def events(self, chunk: Body) -> bytes:
        """What the harness gets of one chunk of the engine; empty if nothing."""
        out: list[bytes] = []
        if not self._begun:
            self._begun = True
            out.append(_event("message_start", message=self._head(chunk)))
        for piece in chunk.get("choices") or ():
            delta = piece.get("delta") or {}
            name, reasoning = reasoning_of(delta)
            if reasoning:
                self._go_on("thinking", {"type": "thinking", "thinking": "", "signature": ""}, out)
                self._signature = name
                out.append(self._delta({"type": "thinking_delta", "thinking": reasoning}))
            for block in delta.get("thinking_blocks") or ():
                self._sealed(block, out)
            if delta.get("content"):
                self._go_on("text", {"type": "text", "text": ""}, out)
                out.append(self._delta({"type": "text_delta", "text": delta["content"]}))
            for call in delta.get("tool_calls") or ():
                self._tool(call, out)
        return b"".join(out)

    def closing(self, public: Body) -> bytes:
        """The events that end a stream whose whole answer is `public`."""
        out: list[bytes] = []
        if self._index < 0 and public.get("content"):
            self._go_on("text", {"type": "text", "text": ""}, out)  # an empty answer is a block all the same
        self._close(out)
        ended = {key: public.get(key) for key in ("stop_reason", "stop_sequence")}
        out.append(_event("message_delta", delta=ended, usage=public.get("usage") or {"output_tokens": 0}))
        out.append(_event("message_stop"))
        return b"".join(out)

    def failure(self, message: str, kind: str) -> bytes:
        """The event that ends a stream that cannot go on."""
        return event_bytes(self._failure(message, kind), "error")

    def _go_on(self, kind: str, block: Body, out: list[bytes]) -> None:
        """In the open block of this kind, or a new one."""
        if self._kind != kind:
            self._begin(kind, block, out)

    def _begin(self, kind: str, block: Body, out: list[bytes]) -> None:
        self._close(out)
        self._index += 1
        self._kind = kind
        out.append(_event("content_block_start", index=self._index, content_block=block))

    def _close(self, out: list[bytes]) -> None:
        if self._kind is None:
            return
        if self._kind == "thinking":
            out.append(self._delta({"type": "signature_delta", "signature": self._signature}))
        out.append(_event("content_block_stop", index=self._index))
        self._kind = self._call = None

    def _sealed(self, block: Body, out: list[bytes]) -> None:
        """A block that a provider has finished: the thinking is out, its signature is to come; or all is hidden."""
        if block.get("type") == "thinking":
            self._go_on("thinking", {"type": "thinking", "thinking": "", "signature": ""}, out)
            self._signature = block.get("signature") or ""
        else:
            self._begin("sealed", block, out)
        self._close(out)

    def _tool(self, call: Body, out: list[bytes]) -> None:
        function = call.get("function") or {}
        number = call.get("index", 0)
        if self._call != number:
            if number in self._calls:
                raise EngineError(f"the engine went back to tool call {number} after it had gone on")
            self._calls.add(number)
            block: Body = {
                "type": "tool_use",
                "id": id_of(call, number),
                "name": function.get("name") or "",
                "input": {},
            }
            self._begin("tool_use", block, out)
            self._call = number
        if function.get("arguments"):
            out.append(self._delta({"type": "input_json_delta", "partial_json": function["arguments"]}))

    def _delta(self, delta: Body) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return event_bytes({"type": kind, **fields}, kind)
