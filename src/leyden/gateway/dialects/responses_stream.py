"""Chunks of an engine to the named events of the Responses API.

An item is opened when its first piece comes. Reasoning and a call are closed when something else begins, text at
the end, since it may go on after a call. The closing event carries the response as it is recorded, where text
stands before calls.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leyden.base.errors import EngineError
from leyden.gateway.dialects.base import Body, event_bytes
from leyden.gateway.dialects.chat_engine import reasoning_of
from leyden.gateway.dialects.responses_items import call_item, message_item, reasoning_item


class ResponseTranslator:
    """See `base.Translator`."""

    def __init__(self, call_id: str, head: Callable[[Mapping[str, Any]], Body], logprobs_wanted: bool) -> None:
        self._call_id = call_id
        self._head = head
        self._logprobs_wanted = logprobs_wanted
        self._response: Body | None = None
        self._number = 0
        self._items: list[Body] = []
        self._open: set[int] = set()
        self._calls: dict[int, int] = {}
        self._logprobs: Sequence[Body] = ()

    def events(self, chunk: Body) -> bytes:
        """What the harness gets of one chunk of the engine; empty if nothing."""
        out: list[bytes] = []
        if self._response is None:
            self._response = self._head(chunk)
            out += [self._event(f"response.{what}", response=self._response) for what in ("created", "in_progress")]
        for piece in chunk.get("choices") or ():
            delta = piece.get("delta") or {}
            name, reasoning = reasoning_of(delta)
            if reasoning:
                self._think(name, reasoning, out)
            if delta.get("content"):
                self._say(delta["content"], (piece.get("logprobs") or {}).get("content") or (), out)
            for call in delta.get("tool_calls") or ():
                self._call(call, out)
        return b"".join(out)

    def closing(self, public: Body) -> bytes:
        """The events that end a stream whose whole answer is `public`."""
        out: list[bytes] = []
        status = public.get("status", "completed")
        if not self._items and public.get("output"):
            self._say("", (), out)  # an empty answer is a message all the same
        for item in public.get("output") or ():
            if item["type"] == "message":
                self._logprobs = item["content"][0].get("logprobs") or []
        for index in sorted(self._open):
            self._close(index, out, status if index == len(self._items) - 1 else "completed")
        out.append(self._event(f"response.{status}", response=public))
        return b"".join(out)

    def failure(self, message: str, kind: str) -> bytes:
        """The event that ends a stream that cannot go on."""
        if self._response is None:
            return self._event("error", code=kind, message=message, param=None)
        error = {"code": "server_error", "message": message}
        done = [item for index, item in enumerate(self._items) if index not in self._open]
        return self._event(
            "response.failed", response={**self._response, "status": "failed", "error": error, "output": done}
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event_bytes({"type": kind, "sequence_number": self._number - 1, **fields}, kind)

    def _begin(self, item: Body, out: list[bytes]) -> int:
        for index in sorted(self._open):
            if self._items[index]["type"] != "message":
                self._close(index, out)
        index = len(self._items)
        self._items.append(item)
        self._open.add(index)
        shown = {**item, "content": []} if "content" in item else {**item, "arguments": ""}
        out.append(self._event("response.output_item.added", output_index=index, item=shown))
        return index

    def _text_item(self, kind: str, item: Callable[[], Body], part: Body, out: list[bytes]) -> int:
        """The open item of this kind, opened if need be."""
        for index in self._open:
            if self._items[index]["type"] == kind:
                return index
        if any(known["type"] == kind for known in self._items):
            raise EngineError(f"the engine went back to its {kind} after it had gone on to something else")
        index = self._begin(item(), out)
        self._items[index]["content"] = [{**part, "text": ""}]
        out.append(self._part_event("response.content_part.added", index, part=part))
        return index

    def _part_event(self, kind: str, index: int, **fields: Any) -> bytes:
        item_id = self._items[index]["id"]
        return self._event(kind, item_id=item_id, output_index=index, content_index=0, **fields)

    def _think(self, name: str, text: str, out: list[bytes]) -> None:
        index = self._text_item(
            "reasoning", lambda: reasoning_item(self._call_id, name, "", "in_progress", False),
            {"type": "reasoning_text", "text": ""}, out,
        )  # fmt: skip
        self._items[index]["content"][0]["text"] += text
        out.append(self._part_event("response.reasoning_text.delta", index, delta=text))

    def _say(self, text: str, logprobs: Any, out: list[bytes]) -> None:
        index = self._text_item(
            "message", lambda: message_item(self._call_id, "", "in_progress", ()),
            {"type": "output_text", "text": "", "annotations": [], "logprobs": []}, out,
        )  # fmt: skip
        shown = list(logprobs) if self._logprobs_wanted else []
        self._items[index]["content"][0]["text"] += text
        out.append(self._part_event("response.output_text.delta", index, delta=text, logprobs=shown))

    def _call(self, delta: Body, out: list[bytes]) -> None:
        function = delta.get("function") or {}
        number = delta.get("index", 0)
        index = self._calls.get(number)
        if index is None:
            named = {**delta, "function": {"name": function.get("name")}}
            item = call_item(self._call_id, number, named, "in_progress")
            index = self._calls[number] = self._begin(item, out)
        elif index not in self._open:
            raise EngineError(f"the engine went back to tool call {number} after it had gone on to another")
        text = function.get("arguments") or ""
        if text:
            self._items[index]["arguments"] += text
            item_id = self._items[index]["id"]
            out.append(
                self._event("response.function_call_arguments.delta", item_id=item_id, output_index=index, delta=text)
            )

    def _close(self, index: int, out: list[bytes], status: str = "completed") -> None:
        item = self._items[index]
        item["status"] = status
        self._open.discard(index)
        if item["type"] == "function_call":
            out.append(
                self._event(
                    "response.function_call_arguments.done", item_id=item["id"], output_index=index,
                    name=item["name"], arguments=item["arguments"],
                )
            )  # fmt: skip
        else:
            part = item["content"][0]
            done = "response.reasoning_text.done"
            extra: Body = {}
            if item["type"] == "message":
                part["logprobs"] = self._logprobs
                done, extra = "response.output_text.done", {"logprobs": self._logprobs}
            out.append(self._part_event(done, index, text=part["text"], **extra))
            out.append(self._part_event("response.content_part.done", index, part=part))
        out.append(self._event("response.output_item.done", output_index=index, item=item))
