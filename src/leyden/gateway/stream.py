"""Relaying a stream: bytes of the engine in, bytes for the harness out, and a copy assembled on the way.

Pure: no connection, no clock. Where the engine's bytes are cut never changes what is relayed or assembled.
The events from the last finish reason on are held back; `terminal` gives them once the record is durable.
"""

import json

import orjson

from leyden.gateway.dialects.base import Assembly, Body, Dialect, ModelRequest, Translator


class Relay:
    """One stream from its first byte to its last."""

    def __init__(self, dialect: Dialect, request: ModelRequest, call_id: str) -> None:
        self._assembly: Assembly = dialect.assembly(request)
        self._translator: Translator = dialect.translator(request, call_id)
        self._num_choices = request.num_choices
        self._rest = b""
        self._data: list[bytes] = []
        self._held: list[bytes] = []
        self._holding = False
        self.done = False
        """Whether the engine said `[DONE]`."""
        self.error: Body | None = None
        """The engine's error, if it sent one inside the stream."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the engine; returns the bytes that may go to the harness now."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        out: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line:
                if line.startswith(b"data:"):
                    self._data.append(line[5:].removeprefix(b" "))
                continue
            if self._data:
                event = b"\n".join(self._data)
                self._data.clear()
                self._take(event, out)
        return b"".join(out)

    @property
    def complete(self) -> bool:
        """Whether the stream ended as it should: every choice finished, `[DONE]` seen, no error."""
        return self.done and self.error is None and self._assembly.complete()

    def terminal(self, public: Body) -> bytes:
        """The events that were held back, and those that end the stream of the answer `public`."""
        return b"".join(self._held) + self._translator.closing(public)

    def failure(self, message: str, kind: str) -> bytes:
        """The event that ends the stream instead."""
        return self._translator.failure(message, kind)

    def assembled(self) -> Body:
        """The engine's answer as it would have been without streaming, as far as it has come."""
        return self._assembly.body()

    def _take(self, event: bytes, out: list[bytes]) -> None:
        if self.done or self.error is not None:
            return
        if event == b"[DONE]":
            self.done = True
            return
        chunk = read_json(event)
        if not isinstance(chunk, dict):
            self.error = {"message": f"the engine streamed what is no JSON object: {event[:80]!r}"}
            return
        if chunk.get("error") is not None or chunk.get("object") == "error":
            error = chunk.get("error", chunk)
            self.error = error if isinstance(error, dict) else {"message": str(error)}
            return
        try:
            self._assembly.add(chunk)
        except (AttributeError, KeyError, TypeError):
            self.error = {"message": f"the engine streamed a chunk of a wrong shape: {event[:80]!r}"}
            return
        if self._assembly.num_choices > self._num_choices:
            self.error = {"message": f"the engine gave more choices than the {self._num_choices} asked for"}
            return
        self._holding = self._holding or self._assembly.complete()
        public = self._translator.events(chunk)
        if public:
            (self._held if self._holding else out).append(public)


def read_json(data: bytes) -> object:
    """The value of JSON text, with NaN and Infinity let in so that they can be refused by name; None if it is
    none.

    Engines written in Python emit `NaN` for a log-probability that went wrong.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            value: object = json.loads(data)
        except ValueError:
            return None
        return value
