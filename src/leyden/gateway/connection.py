"""The server's side of a client connection, with bounds: a request that never becomes whole, headers without end, a
client that takes nothing of its answer. uvicorn has none of the three.

A connection that breaks a bound is closed; a call that waited for it sees a client that left. Model calls are handed to
the gateway without ASGI (`direct`); everything else, and what is seldom (pipelined requests, `expect: 100-continue`),
goes uvicorn's way.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from leyden.gateway.address import Address
from leyden.gateway.client import Client
from leyden.gateway.direct import DirectClient, address_of

Call = Callable[[Address, Sequence[tuple[bytes, bytes]], Client], Awaitable[None]]
"""Answers one model call; headers have names in lower case."""

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together; servers in front of us allow 8 to 32 KiB."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's connection with bounds. Use `bounded` to set the time."""

    client_timeout_s = 60.0
    call: Call

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._arriving: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True
        self._unfinished = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection begins, and its first request is waited for."""
        super().connection_made(transport)
        self._arriving = self.loop.call_later(self.client_timeout_s, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        super().connection_lost(exc)
        for timer in (self._arriving, self._stalled):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        super().data_received(data)
        if self._unfinished and self._arriving is None and not self.transport.is_closing():
            self._arriving = self.loop.call_later(self.client_timeout_s, self._too_slow)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._close(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._unfinished = True

    def on_headers_complete(self) -> None:
        """Its headers are whole."""
        self._in_head = False
        address = None
        if (self.cycle is None or self.cycle.response_complete) and not self.expect_100_continue:
            address = address_of(self.parser.get_method(), self.url)
        if address is None:
            super().on_headers_complete()
            return
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        client = self.cycle = DirectClient(self.transport, self.flow, self.on_response_complete, keep_alive)  # type: ignore[assignment]
        task = self.loop.create_task(self._run(address, self.headers, client))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _run(self, address: Address, headers: Sequence[tuple[bytes, bytes]], client: DirectClient) -> None:
        try:
            await self.call(address, headers, client)
        finally:
            if not client.response_complete:  # nothing else could follow on this connection
                self.transport.close()

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        if isinstance(self.cycle, DirectClient):
            self.cycle.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it is there."""
        self._unfinished = False
        super().on_message_complete()
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def pause_writing(self) -> None:
        """The client takes less than it is sent."""
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.client_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It took what waited."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _too_slow(self) -> None:
        self._arriving = None
        if not self.transport.is_closing():
            self._close(b"408 Request Timeout")

    def _close(self, status: bytes) -> None:
        """Say why, unless an answer is under way, and hang up."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()


def bounded(client_timeout_s: float, call: Call) -> type[BoundedProtocol]:
    """The protocol with this time, and with `call` for model calls."""
    return type("Bounded", (BoundedProtocol,), {"client_timeout_s": client_timeout_s, "call": staticmethod(call)})
