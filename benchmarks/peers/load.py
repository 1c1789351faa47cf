"""Load generator: keep-alive clients on bare asyncio protocols, so that it costs less than what it measures.

Reads one JSON object on standard input: `{host, port, clients: [{path, key}], body, warmup_s, seconds}`; each
client sends its next request as soon as its answer is whole. With `calls` it ends after so many answers, and `seconds`
is the longest that it may take. Prints one JSON object: `{rps, p50_ms, p99_ms, answered, errors}`, where `answered`
counts the warm-up too.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import httptools
import uvloop

Protocol = TypeVar("Protocol", bound=asyncio.Protocol)


class Client(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._sent = 0.0
        self.latencies: list[tuple[float, float]] = []
        """(when the answer was whole, seconds it took)."""
        self.errors = 0
        """Answers with another status than 200, and lost connections."""
        self.running = True
        """Whether to send another request."""
        self.connected = True
        """Whether the server did not close the connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self.errors += int(self.running)
        self.connected = False

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        self.errors += int(self._parser.get_status_code() != 200)
        self.latencies.append((now, now - self._sent))
        if self.running:
            self._send()

    def close(self) -> None:
        """Let go of the connection."""
        self.running = False
        if self._transport is not None:
            self._transport.close()

    def _send(self) -> None:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._sent = time.perf_counter()
        self._transport.write(self._request)


async def connect(job: dict[str, Any], body: Any, make: Callable[[bytes], Protocol]) -> list[Protocol]:
    """A client for each target of `job`, connected; `make` is given the request that it is to send."""
    loop, text = asyncio.get_running_loop(), json.dumps(body).encode()
    clients = []
    for target in job["clients"]:
        head = (
            f"POST {target['path']} HTTP/1.1\r\nhost: {job['host']}\r\n"
            f"authorization: Bearer {target['key']}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        ).encode()
        client = make(head + text)
        clients.append(client)
        await loop.create_connection(lambda client=client: client, job["host"], job["port"])  # type: ignore[misc]
    return clients


async def run(job: dict[str, Any]) -> dict[str, float]:
    """Generate the load."""
    clients = await connect(job, job["body"], Client)
    await asyncio.sleep(job["warmup_s"])
    began = time.perf_counter()
    if "calls" in job:
        await _answered(clients, job["calls"], began + job["seconds"])
    else:
        await asyncio.sleep(job["seconds"])
    ended = time.perf_counter()
    for client in clients:
        client.close()
    taken = sorted(s for client in clients for at, s in client.latencies if began <= at <= ended)
    errors = sum(client.errors for client in clients)
    if not taken:
        return {"rps": 0.0, "p50_ms": float("inf"), "p99_ms": float("inf"), "answered": 0, "errors": errors}
    return {
        "rps": len(taken) / (ended - began),
        "p50_ms": 1000 * taken[len(taken) // 2],
        "p99_ms": 1000 * taken[int(len(taken) * 0.99)],
        "answered": sum(len(client.latencies) for client in clients),
        "errors": errors,
    }


async def _answered(clients: list[Client], num_calls: int, deadline: float) -> None:
    """Wait until so many answers are there."""
    while sum(len(client.latencies) for client in clients) < num_calls:
        if time.perf_counter() > deadline or not any(client.connected for client in clients):
            raise TimeoutError(f"fewer than {num_calls} answers came")
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(json.load(sys.stdin)))))
