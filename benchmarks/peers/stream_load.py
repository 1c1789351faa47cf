"""Load generator for streams of `stamping_engine`: keep-alive clients on bare asyncio protocols.

Reads one JSON object on standard input: `{host, port, clients: [{path, key}], body, rounds}`; each client reads so many
streams, one after another. Prints one JSON object: `first_ms` (request to first event), `event_ms` and `event_p99_ms`
(from the engine's write to here, of the events that nothing holds back), `done`, `errors`, and `held`, the most streams
that were under way at once.
"""

import asyncio
import json
import re
import sys
import time
from typing import Any, cast

import httptools
import uvloop
from benchmarks.peers.load import connect

LIMIT_S = 120.0
"""For the whole load."""
_STAMP = re.compile(rb'"created":(\d+)')


class Streams:
    """What all clients found together."""

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left
        """Streams that have to end."""
        self.first_s: list[float] = []
        """Request to first event."""
        self.event_s: list[float] = []
        """Engine to here."""
        self.done = self.errors = self.active = self.held = 0
        self.all_done = asyncio.Event()

    def ended(self, good: bool) -> None:
        """One stream is over."""
        self.done += int(good)
        self.errors += int(not good)
        self.num_left -= 1
        if self.num_left == 0:
            self.all_done.set()


class Client(asyncio.Protocol):
    """One connection with one stream at a time."""

    def __init__(self, request: bytes, rounds: int, streams: Streams) -> None:
        self._request = request
        self._rounds = rounds
        self._streams = streams
        self._rest, self._num_events, self._done = b"", 0, False
        self._sent = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        for _ in range(self._rounds):
            self._streams.ended(False)
        self._rounds = 0

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        now, now_ns = time.perf_counter(), time.perf_counter_ns()
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            stamp = _STAMP.search(event)
            if self._num_events == 0:
                self._streams.first_s.append(now - self._sent)
                self._streams.active += 1
                self._streams.held = max(self._streams.held, self._streams.active)
            elif stamp is not None and b'"finish_reason":null' in event:
                self._streams.event_s.append((now_ns - int(stamp[1])) / 1e9)
            self._num_events += 1
            self._done = self._done or event == b"data: [DONE]"

    def on_message_complete(self) -> None:
        self._streams.active -= int(self._num_events > 0)
        self._streams.ended(self._done and self._parser.get_status_code() == 200)
        self._rounds -= 1
        if self._rounds > 0:
            self._send()

    def _send(self) -> None:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._rest, self._num_events, self._done = b"", 0, False
        self._sent = time.perf_counter()
        self._transport.write(self._request)


async def run(job: dict[str, Any]) -> dict[str, float]:
    """Generate the load."""
    streams = Streams(len(job["clients"]) * job["rounds"])
    await connect(job, {**job["body"], "stream": True}, lambda request: Client(request, job["rounds"], streams))
    async with asyncio.timeout(LIMIT_S):
        await streams.all_done.wait()
    first, events = sorted(streams.first_s), sorted(streams.event_s)
    return {
        "first_ms": 1000 * first[len(first) // 2] if first else float("inf"),
        "event_ms": 1000 * events[len(events) // 2] if events else float("inf"),
        "event_p99_ms": 1000 * events[int(len(events) * 0.99)] if events else float("inf"),
        "done": streams.done,
        "errors": streams.errors,
        "held": streams.held,
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(json.load(sys.stdin)))))
