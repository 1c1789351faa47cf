"""The server's side of a client connection, with bounds: a request that never becomes whole, headers without end, a
client that takes nothing of its answer. uvicorn has none of the three.

A connection that breaks a bound is closed; a call that waited for it sees a client that left.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together; servers in front of us allow 8 to 32 KiB."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's connection with bounds. Use `bounded` to set the time."""

    client_timeout_s = 60.0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._arriving: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_head = True

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
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._close(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._arriving is None:
            self._arriving = self.loop.call_later(self.client_timeout_s, self._too_slow)

    def on_headers_complete(self) -> None:
        """Its headers are whole."""
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of it is there."""
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


def bounded(client_timeout_s: float) -> type[BoundedProtocol]:
    """The protocol with this time."""
    return type("Bounded", (BoundedProtocol,), {"client_timeout_s": client_timeout_s})
