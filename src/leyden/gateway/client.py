"""The harness's side of one model call: reads the body, answers, and notices when it leaves.

`Client` is what a call needs; `AsgiClient` is one of any ASGI server, `direct.DirectClient` that of our own protocol.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from leyden.base.errors import RequestRefused

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
EVENT_STREAM: tuple[bytes, bytes] = (b"content-type", b"text/event-stream; charset=utf-8")


WATCH_AFTER_S = 0.02
"""No model answers sooner, and a harness that left is noticed soon enough."""


class ClientLeftError(Exception):
    """The harness closed the connection before its request was whole. Never leaves the gateway."""


def too_large(max_bytes: int) -> RequestRefused:
    """A body is longer than it may be."""
    return RequestRefused(
        f"the request has more than {max_bytes} bytes", status=413, kind="request_too_large",
        hint="shorten it, or raise gateway.max_body_bytes",
    )  # fmt: skip


class Client(ABC):
    """One request's connection."""

    started = False
    """Whether status and headers went out."""
    finished = False
    """Whether the answer is complete, or nobody is there to take it."""

    @abstractmethod
    async def body(self, max_bytes: int) -> bytes:
        """The request's body. Raises RequestRefused (413), ClientLeftError."""

    @abstractmethod
    def watch(self, on_left: Callable[[], None]) -> None:
        """Call `on_left` once if the harness closes the connection before its answer is complete."""

    @abstractmethod
    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers."""

    @abstractmethod
    async def part(self, body: bytes) -> None:
        """Send a part of the body."""

    @abstractmethod
    async def end(self, body: bytes = b"") -> None:
        """Send the last part of the body."""

    @abstractmethod
    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""

    async def json(self, status: int, body: object, headers: Headers | None = None) -> None:
        """Send a JSON answer."""
        await self.whole(status, [JSON, *(headers or ())], orjson.dumps(body))


class AsgiClient(Client):
    """See `Client`."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Future[Message] | None = None

    async def body(self, max_bytes: int) -> bytes:
        """The request's body. Raises RequestRefused (413), ClientLeftError."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.finished = True
                raise ClientLeftError
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise too_large(max_bytes)
            if not message.get("more_body", False):
                return part if not parts else b"".join([*parts, part])
            parts.append(part)

    def watch(self, on_left: Callable[[], None]) -> None:
        """Call `on_left` once if the harness closes the connection before its answer is complete.

        Looking begins after `WATCH_AFTER_S`, since a call that is over before then needs no task of its own.
        """
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._look, on_left)

    def _look(self, on_left: Callable[[], None]) -> None:
        def done(future: "asyncio.Future[Message]") -> None:
            if not future.cancelled() and future.exception() is None and not self.finished:
                self.finished = True
                on_left()

        self._watch = asyncio.ensure_future(self._receive())
        self._watch.add_done_callback(done)

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers."""
        self.started = True
        if not self.finished:
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def part(self, body: bytes) -> None:
        """Send a part of the body."""
        if not self.finished:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        """Send the last part of the body."""
        if not self.finished:
            self.finished = True
            await self._send({"type": "http.response.body", "body": body})
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""
        headers.append((b"content-length", b"%d" % len(body)))
        await self.start(status, headers)
        await self.end(body)
