"""HTTP/1.1 without TLS towards engines: kept connections, one request at a time on each, an answer in one piece or as
it comes. It is the hot path, where a client that can do everything costs a third of a call.

It promises: a request is written once and never again; a connection is used again only after an answer that was whole;
every wait has the deadline of its request. It does not follow redirects, keep cookies, or speak TLS or HTTP/2.

Raises ConnectionRefusedError where nothing was sent, ConnectionResetError where an answer broke off or is no HTTP,
TimeoutError past the deadline.
"""

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from typing import cast
from urllib.parse import quote, urlsplit

import httptools
from aiohttp.abc import AbstractResolver

KEEP_S = 3.0
"""Idle connections are dropped before uvicorn engines drop them (5 s), so that no request meets a closing one."""
MAX_WAITING_BYTES = 2**18
"""Of a stream that is read slower than it comes: then the engine is not read either."""
_SAFE = "/:@!$&'()*+,;=%~-._"
"""What a path may hold as it is; RFC 3986, and the percent sign, since it was quoted before."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads."""

    host: str
    """Name or address."""
    port: int
    """TCP port."""
    head: bytes
    """Request line and host header of a POST."""


@lru_cache(maxsize=1024)
def target_of(url: str) -> Target | None:
    """The target of a URL without TLS and without a user; None for any other."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.username is not None:
        return None
    path = quote(parts.path or "/", safe=_SAFE) + (f"?{quote(parts.query, safe=_SAFE + '?')}" if parts.query else "")
    host = parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")
    head = b"POST " + path.encode("ascii") + b" HTTP/1.1\r\nhost: " + host + b"\r\naccept: */*\r\n"
    return Target(parts.hostname, parts.port or 80, head)


class Pool:
    """Connections by target."""

    def __init__(self, resolver: AbstractResolver) -> None:
        self._resolver = resolver
        self._idle: dict[tuple[str, int], deque[Connection]] = {}
        self._open: set[Connection] = set()
        self._sweeping: asyncio.TimerHandle | None = None

    async def post(self, target: Target, payload: bytes, headers: Mapping[str, str], timeout_s: float) -> "Answer":
        """The answer to a POST as soon as its head is there. See the module for what is raised."""
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
            raise ValueError("a header for an engine holds a line break")
        head = b"%b%bcontent-length: %d\r\n\r\n" % (target.head, lines.encode("latin-1"), len(payload))
        deadline = asyncio.get_running_loop().time() + timeout_s
        connection = self._take(target)
        if connection is None:
            async with asyncio.timeout_at(deadline):
                connection = await self._connect(target)
        return await connection.ask(head + payload, deadline)

    def close(self) -> None:
        """Drop every connection."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self._open):
            connection.drop(ConnectionResetError("the gateway closed its connections"))

    def _take(self, target: Target) -> "Connection | None":
        idle = self._idle.get((target.host, target.port))
        oldest = asyncio.get_running_loop().time() - KEEP_S
        while idle:
            connection = idle.pop()
            if connection.usable and connection.idle_since > oldest:
                return connection
            connection.drop(None)
        return None

    async def _connect(self, target: Target) -> "Connection":
        loop = asyncio.get_running_loop()
        slot = (target.host, target.port)
        try:
            addresses = [target.host] if _is_address(target.host) else await self._addresses(target)
        except OSError as error:
            raise ConnectionRefusedError(f"{target.host} has no address: {error}") from error
        failure: OSError | None = None
        for address in addresses:
            try:
                _, made = await loop.create_connection(lambda: Connection(self, slot), address, target.port)
            except OSError as error:
                failure = error
            else:
                return made
        raise ConnectionRefusedError(f"cannot connect to {target.host}:{target.port}: {failure}") from failure

    async def _addresses(self, target: Target) -> list[str]:
        found = await self._resolver.resolve(target.host, target.port)
        return list(dict.fromkeys(entry["host"] for entry in found))

    def opened(self, connection: "Connection") -> None:
        """A connection is there."""
        self._open.add(connection)

    def gone(self, connection: "Connection") -> None:
        """A connection is closed."""
        self._open.discard(connection)
        idle = self._idle.get(connection.slot)
        if idle is not None and connection in idle:
            idle.remove(connection)

    def give_back(self, connection: "Connection") -> None:
        """A connection may be used again."""
        self._idle.setdefault(connection.slot, deque()).append(connection)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(KEEP_S, self._sweep)

    def _sweep(self) -> None:
        """Drop what was idle for too long, the longest first."""
        self._sweeping = None
        loop = asyncio.get_running_loop()
        for slot, idle in list(self._idle.items()):
            while idle and idle[0].idle_since <= loop.time() - KEEP_S:
                idle.popleft().drop(None)
            if not idle:
                del self._idle[slot]
        if self._idle:
            self._sweeping = loop.call_later(KEEP_S, self._sweep)


class Connection(asyncio.Protocol):
    """One connection, with one answer at a time."""

    def __init__(self, pool: Pool, slot: tuple[str, int]) -> None:
        self.slot = slot
        """Host and port."""
        self.idle_since = 0.0
        """On the loop's clock."""
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._parser = httptools.HttpResponseParser(self)

    @property
    def usable(self) -> bool:
        """Whether a request may be written."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, deadline: float) -> "Answer":
        """The answer, once its head is there."""
        assert self._answer is None and self._transport is not None
        loop = asyncio.get_running_loop()
        answer = self._answer = Answer(self, loop.call_at(deadline, self._late))
        self._transport.write(request)
        try:
            await answer.begun()
        except BaseException:  # whoever waited goes away, so nobody may get this answer later
            self.drop(None)
            raise
        return answer

    def reading(self, wanted: bool) -> None:
        """Take bytes from the engine, or leave them with it."""
        if self.usable:
            assert self._transport is not None
            self._transport.resume_reading() if wanted else self._transport.pause_reading()

    def drop(self, reason: BaseException | None) -> None:
        """Close it. Whoever reads its answer gets `reason`."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.end(reason or ConnectionResetError("the connection was dropped"))
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._pool.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._pool.gone(self)
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if answer.ends_with_connection and exc is None:
            answer.end(None)
        else:
            why = f": {exc}" if exc is not None else ""
            answer.end(ConnectionResetError(f"the engine closed the connection{why}"))

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.drop(ConnectionResetError(f"the engine answered what is no HTTP: {error}"))

    def on_message_begin(self) -> None:
        """See httptools."""
        if self._answer is None:  # an answer that nobody asked for must not be taken for the next one
            self.drop(None)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        if self._answer is not None:
            self._answer.headers[name.lower().decode("latin-1")] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """See httptools."""
        if self._answer is not None:
            self._answer.begin(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        if self._answer is not None:
            self._answer.feed(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        answer = self._answer
        if answer is None:
            return
        if answer.status < 200:  # "continue" and the like: the answer is still to come
            answer.status = 0
            answer.headers.clear()
            return
        if answer.ends_with_connection:
            return
        self._answer = None
        answer.end(None)
        if self._parser.should_keep_alive() and self.usable:
            self.idle_since = asyncio.get_running_loop().time()
            self._pool.give_back(self)
        else:
            self.drop(None)

    def _late(self) -> None:
        self.drop(TimeoutError())


class Answer:
    """One answer; see `providers.base.Response`."""

    def __init__(self, connection: Connection, timer: asyncio.TimerHandle) -> None:
        self.status = 0
        """HTTP status; 0 before it is known."""
        self.headers: dict[str, str] = {}
        """By name in lower case; of several the last."""
        self.ends_with_connection = False
        """Whether its body has no other end than that of the connection."""
        self._connection = connection
        self._timer = timer
        self._parts: list[bytes] = []
        self._num_waiting_bytes = 0
        self._whole = False
        self._paused = False
        self._ended = False
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._inflate: zlib._Decompress | None = None

    @property
    def content(self) -> "Answer":
        """The body."""
        return self

    def at_eof(self) -> bool:
        """Whether everything was read."""
        return self._ended and self._error is None and not self._parts

    async def begun(self) -> None:
        """Wait for the head."""
        while self.status < 200:
            if self._error is not None:
                raise self._error
            await self._more()

    async def read(self) -> bytes:
        """The rest of the body."""
        self._whole = True
        self._resume()
        while not self._ended:
            await self._more()
        if self._error is not None:
            raise self._error
        return self._drain()

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Pieces as they arrive."""
        while True:
            if self._parts:
                data = self._drain()
                self._resume()
                if data:
                    yield data
            elif self._error is not None:
                raise self._error
            elif self._ended:
                return
            else:
                await self._more()

    def close(self) -> None:
        """Drop the connection, unless the answer is whole."""
        if not self._ended:
            self._connection.drop(None)

    def release(self) -> None:
        """Let go of the answer; its connection is used again if it is whole."""
        self.close()

    def begin(self, status: int) -> None:
        """The head is there."""
        self.status = status
        if status < 200:
            return
        headers = self.headers
        coding = headers.get("content-encoding", "identity").lower()
        if coding in ("gzip", "x-gzip", "deflate"):
            self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)
        elif coding != "identity":
            self._connection.drop(ConnectionResetError(f"the engine answered in the encoding {coding!r}"))
            return
        framed = "content-length" in headers or "transfer-encoding" in headers
        self.ends_with_connection = not framed and status not in (204, 304)
        self._wake()

    def feed(self, body: bytes) -> None:
        """A piece of the body is there."""
        if self._inflate is not None:
            try:
                body = self._inflate.decompress(body)
            except zlib.error as error:
                self._connection.drop(ConnectionResetError(f"the engine's compressed answer is broken: {error}"))
                return
        self._parts.append(body)
        self._num_waiting_bytes += len(body)
        if not self._whole:
            if self._num_waiting_bytes > MAX_WAITING_BYTES and not self._paused:
                self._paused = True
                self._connection.reading(False)
            self._wake()

    def end(self, error: BaseException | None) -> None:
        """There is no more to come, because of `error` if there is one."""
        if not self._ended:
            self._ended, self._error = True, error
            self._timer.cancel()
            self._resume()
            self._wake()

    def _drain(self) -> bytes:
        parts, self._parts = self._parts, []
        self._num_waiting_bytes = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._connection.reading(True)

    async def _more(self) -> None:
        """Wait until something changes."""
        assert self._waiter is None, "an answer has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _is_address(host: str) -> bool:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
