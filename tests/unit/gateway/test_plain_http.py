"""The HTTP client towards engines, against servers that answer with scripted bytes."""

import asyncio
import gzip
import itertools
import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import ThreadedResolver
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.gateway import plain_http
from leyden.gateway.plain_http import Pool, Target, target_of

BOUND_S = 20.0
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serving = tuple[Pool, Target, list[bytes]]


def _answer(body: bytes, head: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n" + head + b"content-length: %d\r\n\r\n" % len(body) + body


@asynccontextmanager
async def _serving(handler: Handler):  # type: ignore[no-untyped-def]
    """(pool, target, requests by connection) of a server whose connections `handler` answers."""
    connections: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(b"")
        writers.append(writer)
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    target = target_of(f"http://127.0.0.1:{port}/v1/x")
    assert target is not None
    pool = Pool(ThreadedResolver())
    try:
        async with asyncio.timeout(BOUND_S):
            yield pool, target, connections
    finally:
        pool.close()
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0)


async def _request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


def _always(answer: bytes) -> Handler:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await _request(reader)
            writer.write(answer)

    return handler


def test_a_request_says_path_host_headers_and_body() -> None:
    seen: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await _request(reader))
        writer.write(_answer(b"yes"))

    async def main() -> None:
        async with _serving(handler) as (pool, target, _):
            answer = await pool.post(target, b"{}", {"authorization": "Bearer k"}, BOUND_S)
            assert (answer.status, await answer.read()) == (200, b"yes")

    asyncio.run(main())
    head, _, body = seen[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/x HTTP/1.1" and b"authorization: Bearer k" in lines and body == b"{}"
    assert any(line.startswith(b"host: 127.0.0.1:") for line in lines)


def test_a_connection_is_used_again_after_a_whole_answer_only() -> None:
    async def main() -> None:
        async with _serving(_always(_answer(b"one"))) as (pool, target, connections):
            for _ in range(3):
                answer = await pool.post(target, b"{}", {}, BOUND_S)
                assert await answer.read() == b"one" and answer.at_eof()
                answer.release()
            assert len(connections) == 1
            half = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\npart"
        async with _serving(_always(half)) as (pool, target, connections):
            for _ in range(2):
                answer = await pool.post(target, b"{}", {}, BOUND_S)
                assert not answer.at_eof()
                answer.close()
            assert len(connections) == 2

    asyncio.run(main())


def test_two_requests_at_once_have_two_connections() -> None:
    async def main() -> None:
        async with _serving(_always(_answer(b"x"))) as (pool, target, connections):
            answers = await asyncio.gather(*(pool.post(target, b"{}", {}, BOUND_S) for _ in range(2)))
            assert [await answer.read() for answer in answers] == [b"x", b"x"] and len(connections) == 2

    asyncio.run(main())


def test_idle_connections_are_dropped_after_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_http, "KEEP_S", 0.05)
    closed = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(_answer(b"x"))
        assert await reader.read() == b""
        closed.set()

    async def main() -> None:
        async with _serving(handler) as (pool, target, _):
            await (await pool.post(target, b"{}", {}, BOUND_S)).read()
            await closed.wait()

    asyncio.run(main())


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n5\r\ndefgh\r\n0\r\n\r\n"


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, len(CHUNKED) - 1), max_size=4))
def test_where_an_answer_is_cut_into_packets_changes_nothing(cuts: list[int]) -> None:
    edges = [0, *sorted(set(cuts)), len(CHUNKED)]

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        for start, end in itertools.pairwise(edges):
            writer.write(CHUNKED[start:end])
            await writer.drain()
            await asyncio.sleep(0.001)
        await reader.read()

    async def main() -> None:
        async with _serving(handler) as (pool, target, _):
            answer = await pool.post(target, b"{}", {}, BOUND_S)
            assert b"".join([data async for data in answer.iter_any()]) == b"abcdefgh" and answer.at_eof()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("head", "sent"),
    [
        (b"content-encoding: gzip\r\n", gzip.compress(b"text", mtime=0)),
        (b"content-encoding: identity\r\n", b"text"),
        (b"", b"text"),
    ],
)
def test_compressed_answers_are_read(head: bytes, sent: bytes) -> None:
    async def main() -> None:
        async with _serving(_always(_answer(sent, head))) as (pool, target, _):
            assert await (await pool.post(target, b"{}", {}, BOUND_S)).read() == b"text"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "closed the connection"),
        (b"hello\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", "closed the connection"),
        (_answer(b"x", b"content-encoding: br\r\n"), "encoding 'br'"),
        (_answer(b"no gzip", b"content-encoding: gzip\r\n"), "compressed answer is broken"),
    ],
)
def test_an_answer_that_breaks_off_is_a_broken_connection(raw: bytes, message: str) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(raw)

    async def main() -> None:
        async with _serving(handler) as (pool, target, _):
            with pytest.raises(ConnectionResetError, match=message):
                await (await pool.post(target, b"{}", {}, BOUND_S)).read()

    asyncio.run(main())


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")

    async def main() -> None:
        async with _serving(handler) as (pool, target, _):
            answer = await pool.post(target, b"{}", {}, BOUND_S)
            assert await answer.read() == b"all of it" and answer.at_eof()

    asyncio.run(main())


def test_a_continue_before_the_answer_is_passed_over() -> None:
    async def main() -> None:
        async with _serving(_always(b"HTTP/1.1 100 Continue\r\n\r\n" + _answer(b"x"))) as (pool, target, _):
            answer = await pool.post(target, b"{}", {}, BOUND_S)
            assert (answer.status, await answer.read()) == (200, b"x")

    asyncio.run(main())


def test_an_answer_that_nobody_asked_for_is_never_taken_for_the_next_one() -> None:
    async def main() -> None:
        async with _serving(_always(_answer(b"mine") + _answer(b"poison"))) as (pool, target, connections):
            for _ in range(3):
                assert await (await pool.post(target, b"{}", {}, BOUND_S)).read() == b"mine"
            assert len(connections) == 3

    asyncio.run(main())


def test_a_deadline_ends_the_wait_for_a_head_and_for_a_body() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        await reader.read()

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await reader.read()

    async def main() -> None:
        async with _serving(silent) as (pool, target, _):
            with pytest.raises(TimeoutError):
                await pool.post(target, b"{}", {}, 0.05)
        async with _serving(half) as (pool, target, _):
            answer = await pool.post(target, b"{}", {}, 0.3)
            with pytest.raises(TimeoutError):
                await answer.read()

    asyncio.run(main())


def test_the_engine_sees_when_whoever_waits_goes_away() -> None:
    left = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _request(reader)
        await reader.read()
        left.set()

    async def main() -> None:
        async with _serving(handler) as (pool, target, _):
            task = asyncio.create_task(pool.post(target, b"{}", {}, BOUND_S))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await left.wait()

    asyncio.run(main())


def test_a_stream_that_nobody_reads_holds_the_engine_back() -> None:
    sent = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await _request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x" * 100_000)
            await writer.drain()
            sent += 100_000

    async def main() -> None:
        async with _serving(handler) as (pool, target, _):
            answer = await pool.post(target, b"{}", {}, BOUND_S)
            before = -1
            while sent != before:  # until the buffers of both kernels are full
                before = sent
                await asyncio.sleep(0.1)
            assert sent < 50_000_000
            assert sum([len(data) async for data in answer.iter_any()]) == 100_000_000

    asyncio.run(main())


def test_a_connection_that_cannot_be_made_is_told_apart() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        target = target_of(f"http://127.0.0.1:{port}/")
        assert target is not None
        pool = Pool(ThreadedResolver())
        with pytest.raises(ConnectionRefusedError, match=f"127.0.0.1:{port}"):
            await pool.post(target, b"{}", {}, BOUND_S)

    asyncio.run(main())


def test_a_header_with_a_line_break_is_never_sent() -> None:
    async def main() -> None:
        async with _serving(_always(_answer(b"x"))) as (pool, target, _):
            with pytest.raises(ValueError, match="line break"):
                await pool.post(target, b"{}", {"a": "b\r\nc: d"}, BOUND_S)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "host", "port", "line"),
    [
        ("http://a", "a", 80, b"POST / HTTP/1.1\r\nhost: a\r\n"),
        ("http://a:81/v1/x y", "a", 81, b"POST /v1/x%20y HTTP/1.1\r\nhost: a:81\r\n"),
        ("http://[::1]:82/v1?q=1", "::1", 82, b"POST /v1?q=1 HTTP/1.1\r\nhost: [::1]:82\r\n"),
        ("http://a/b%20c", "a", 80, b"POST /b%20c HTTP/1.1\r\nhost: a\r\n"),
    ],
)
def test_a_url_without_tls_has_a_target(url: str, host: str, port: int, line: bytes) -> None:
    target = target_of(url)
    assert target is not None
    assert (target.host, target.port) == (host, port) and target.head.startswith(line)


@pytest.mark.parametrize("url", ["https://a/", "http://user:key@a/", "ftp://a/", "http:///x"])
def test_other_urls_have_none(url: str) -> None:
    assert target_of(url) is None
