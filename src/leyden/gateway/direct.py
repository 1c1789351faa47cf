"""A model call on our own server protocol, without ASGI between them: one write for a whole answer, no message
dictionaries, no task that waits for the client to leave.

To the protocol it is what uvicorn calls a cycle: the request under way on a connection.
"""

import asyncio
import re
from collections.abc import Callable
from functools import lru_cache

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from leyden.base.errors import RequestRefused
from leyden.gateway.address import Address, read_address
from leyden.gateway.client import Client, ClientLeftError, Headers, too_large

_FORBIDDEN = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""What would end a header, or confuse who reads it."""
_MAX_REMEMBERED = 512
"""Bytes of a URL that is remembered; ours have about 150, and a stranger must not fill the memory with his."""


def address_of(method: bytes, url: bytes) -> Address | None:
    """The address of a model call as it is on the request line. None for what is none, or is written unusually."""
    if method != b"POST" or len(url) > _MAX_REMEMBERED:
        return None
    return _read(url)


@lru_cache(maxsize=4096)
def _read(url: bytes) -> Address | None:
    if b"%" in url or not url.startswith(b"/"):
        return None
    try:
        return read_address(url.partition(b"?")[0].decode("ascii"))
    except UnicodeDecodeError:
        return None


class DirectClient(Client):
    """See `Client`."""

    def __init__(
        self, transport: asyncio.Transport, flow: FlowControl, on_response: Callable[[], None], keep_alive: bool
    ) -> None:
        self.keep_alive = keep_alive
        """Whether the connection goes on after the answer."""
        self.more_body = True
        """Whether the request is not whole yet."""
        self.disconnected = False
        """Whether the harness closed the connection."""
        self.response_started = False
        """As `started`, under uvicorn's name."""
        self.response_complete = False
        """Whether the answer is whole."""
        self._transport = transport
        self._flow = flow
        self._on_response = on_response
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._max_bytes: int | None = None
        self._arrived: asyncio.Future[None] | None = None
        self._on_left: Callable[[], None] | None = None

    @property
    def message_event(self) -> "DirectClient":
        """What the protocol tells that something changed."""
        return self

    def set(self) -> None:
        """The request is whole, or the harness left."""
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        if self.disconnected and not self.finished:
            self.finished = True
            if self._on_left is not None:
                self._on_left()

    def feed(self, part: bytes) -> None:
        """A piece of the body; beyond what may be, none is kept."""
        self._num_bytes += len(part)
        if self._max_bytes is None or self._num_bytes <= self._max_bytes:
            self._parts.append(part)
        elif self._parts:
            self._parts.clear()
            self.set()

    async def body(self, max_bytes: int) -> bytes:
        """The request's body. Raises RequestRefused (413), ClientLeftError."""
        self._max_bytes = max_bytes
        while self._num_bytes <= max_bytes:
            if self.disconnected:
                self.finished = True
                raise ClientLeftError
            if not self.more_body:
                parts, self._parts = self._parts, []
                return parts[0] if len(parts) == 1 else b"".join(parts)
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived
        raise too_large(max_bytes)

    def watch(self, on_left: Callable[[], None]) -> None:
        """Call `on_left` once if the harness closes the connection before its answer is complete."""
        self._on_left = on_left
        if self.disconnected:
            self.finished = True
            on_left()

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers; the body will come in parts."""
        self.started = self.response_started = True
        if not self.finished:
            await self._write(self._head(status, headers, b"transfer-encoding: chunked\r\n"))

    async def part(self, body: bytes) -> None:
        """Send a part of the body."""
        if body and not self.finished:
            await self._write(b"%x\r\n%b\r\n" % (len(body), body))

    async def end(self, body: bytes = b"") -> None:
        """Send the last part of the body."""
        if not self.finished:
            last = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            await self._write(last + b"0\r\n\r\n")
            self._complete()

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""
        self.started = self.response_started = True
        if not self.finished:
            await self._write(self._head(status, headers, b"content-length: %d\r\n" % len(body)) + body)
            self._complete()

    def _head(self, status: int, headers: Headers, framing: bytes) -> bytes:
        values = b"".join([value for _, value in headers])
        if _FORBIDDEN.search(values):
            raise RequestRefused(
                "a header of the answer would hold a control character", status=500, kind="internal_error",
                hint="rename the policy: its name is in a header",
            )  # fmt: skip
        lines = [b"%b: %b\r\n" % header for header in headers]
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        return b"%b%b%b%b\r\n" % (STATUS_LINE[status], b"".join(lines), framing, closing)

    async def _write(self, data: bytes) -> None:
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if not self.disconnected:
            self._transport.write(data)

    def _complete(self) -> None:
        if self.disconnected:
            return
        self.finished = self.response_complete = True
        self._parts.clear()
        if not self.keep_alive:
            self._transport.close()
        self._on_response()
