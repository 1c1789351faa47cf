"""A fake engine that follows the wire format of vLLM's server (others: `formats`), for tests and benchmarks; no
model, no torch.

    with FakeEngine() as engine:            # a thread of its own, a free port
        engine.behaviour.reply = lambda body: Reply(text="SELECT 1")
        ... engine.url ...

or `python -m leyden.testing.fake_engine --port 8001`. It is a bare asyncio protocol on httptools, so that a
benchmark measures what stands in front of it and not the engine.
"""

import argparse
import asyncio
import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, cast

import httptools
import orjson
import uvloop

from leyden.testing import formats
from leyden.testing.scripted import Behaviour, Reply, prompt_ids, thought
from leyden.testing.wire import Answer

KEEP_REQUESTS = 1000
"""Requests kept for tests to look at; older ones are forgotten, so that memory stays flat."""


class FakeEngine:
    """An engine in a thread of its own; a context manager."""

    def __init__(self, behaviour: Behaviour | None = None, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.behaviour = behaviour or Behaviour()
        """What it does; may be changed while it runs."""
        self.requests: deque[dict[str, Any]] = deque(maxlen=KEEP_REQUESTS)
        """Bodies of generation requests, oldest first; probes of a gateway are not among them."""
        self.headers: deque[dict[str, str]] = deque(maxlen=KEEP_REQUESTS)
        """Headers of the same requests."""
        self.num_probes = 0
        """Generation requests that a gateway marked as probes."""
        self.num_aborted = 0
        """Generations whose client left before the end."""
        self.canned: dict[str, bytes] = {}
        """Answers that are repeated, by path, where the behaviour says so."""
        self._host, self._port = host, port
        self._serial = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Server | None = None
        self._thread: threading.Thread | None = None
        self._connections: set[_Connection] = set()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_server(lambda: _Connection(self), self._host, self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close every connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()

    def __enter__(self) -> Self:
        ready = threading.Event()

        async def run() -> None:
            await self.start()
            self._stop = asyncio.Event()
            ready.set()
            await self._stop.wait()
            await self.stop()
            await asyncio.sleep(0)  # lets the transports close before the loop goes

        self._thread = threading.Thread(target=lambda: asyncio.run(run()), name="fake-engine", daemon=True)
        self._thread.start()
        if not ready.wait(10):
            raise RuntimeError("the fake engine did not start within 10 s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None and self._thread is not None
        if not self._thread.is_alive():  # a test that took it down itself
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def next_serial(self) -> int:
        """A number for the next answer."""
        self._serial += 1
        return self._serial


class _Connection(asyncio.Protocol):
    """One connection: parses requests, answers them one after another."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._new_request()

    def _new_request(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._headers: dict[str, str] = {}
        self._path = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._engine._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine._connections.discard(self)
        if self._task is not None and not self._task.done():
            self._engine.num_aborted += 1
            self._task.cancel()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url.decode().partition("?")[0]

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path, headers, raw = self._path, self._headers, b"".join(self._body)
        self._new_request()
        slow = self._answer_now(path, headers, raw)
        if slow is not None:
            self._task = asyncio.ensure_future(slow)

    def _answer_now(self, path: str, headers: Mapping[str, str], raw: bytes) -> Any:
        """Answer at once where that is possible; otherwise the coroutine that will."""
        engine, behaviour = self._engine, self._engine.behaviour
        if path.endswith("/models") and behaviour.models_status != 200:
            return self._send_json(behaviour.models_status, {"error": {"message": "scripted", "type": "scripted"}})
        if behaviour.key and behaviour.key not in (
            headers.get("authorization", "").removeprefix("Bearer "), headers.get("x-api-key")
        ):  # fmt: skip
            return self._send_json(401, {"error": {"message": "wrong key", "type": "auth", "code": 401}})
        if path.endswith("/models") and behaviour.models_text is not None:
            return self._write(200, b"application/json", behaviour.models_text.encode())
        if path.endswith("/models"):
            listed = [{"id": name, "object": "model"} for name in behaviour.models]
            return self._send_json(200, {"object": "list", "data": listed})
        if path == "/health":
            return self._write(200, b"text/plain", b"")
        if path == "/tokenize" and not behaviour.faults.no_tokenize:
            ids = prompt_ids(orjson.loads(raw))
            return self._send_json(200, {"count": len(ids), "max_model_len": 2048, "tokens": ids})
        if not path.endswith(("/completions", "/messages")):
            return self._send_json(404, {"error": {"message": f"no route {path}", "type": "not_found"}})
        if behaviour.canned and path in engine.canned and b'"stream":true' not in raw:
            return self._write(200, b"application/json", engine.canned[path])
        body = orjson.loads(raw)
        faults = behaviour.faults
        if headers.get("x-leyden-probe"):
            engine.num_probes += 1
        else:
            engine.requests.append(body)
            engine.headers.append(dict(headers))
            if faults.status != 200 and len(engine.requests) <= faults.fail_first:
                error = {
                    "message": f"scripted status {faults.status}",
                    "type": "scripted",
                    "code": faults.status,
                }
                after = b"" if faults.retry_after_s is None else b"retry-after: %d\r\n" % faults.retry_after_s
                return self._write(faults.status, b"application/json", orjson.dumps({"error": error}), after)
            if faults.drop:
                self.close()
                return None
        refused = formats.refusal(behaviour, body) if path.endswith("/completions") else formats.forged(body)
        if refused is not None:
            return self._send_json(400, {"error": {"message": refused, "type": "invalid_request_error"}})
        if behaviour.delay_s == 0 and not body.get("stream"):
            return self._send_whole(body, path)
        return self._send_slowly(body, path)

    def _make(self, body: Mapping[str, Any]) -> Answer:
        behaviour = self._engine.behaviour
        wanted = (body.get("n") or 1) + behaviour.faults.extra_choices
        replies: list[Reply] = [thought(behaviour.reply(body), body) for _ in range(wanted)]
        asked = formats.asked(behaviour, body)
        return Answer(asked, replies, behaviour.faults, self._engine.next_serial())

    def _whole(self, body: Mapping[str, Any], path: str) -> dict[str, Any]:
        behaviour = self._engine.behaviour
        if path.endswith("/messages"):
            return formats.message(body, behaviour.reply(body), self._engine.next_serial())
        return formats.whole(behaviour, body, self._make(body).whole())

    def _events(self, body: Mapping[str, Any], path: str) -> list[bytes]:
        if path.endswith("/messages"):
            return list(formats.message_events(self._whole(body, path)))
        return [b"data: " + _dumps(chunk) + b"\n\n" for chunk in self._make(body).chunks()]

    def _send_whole(self, body: Mapping[str, Any], path: str) -> None:
        faults = self._engine.behaviour.faults
        payload = b"<html>busy</html>" if faults.no_json else _dumps(self._whole(body, path))
        if self._engine.behaviour.canned and body.get("max_tokens") != 1:  # a probe is no answer to keep
            self._engine.canned[path] = payload
        self._write(200, b"application/json", payload)

    async def _send_slowly(self, body: Mapping[str, Any], path: str) -> None:
        behaviour = self._engine.behaviour
        await asyncio.sleep(behaviour.delay_s)
        if not body.get("stream"):
            self._send_whole(body, path)
            return
        faults = behaviour.faults
        assert self._transport is not None
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n%b\r\n"
            % self._limits()
        )
        events = self._events(body, path)
        if faults.error_in_stream:
            events[1:] = [b'data: {"error": {"message": "scripted error", "type": "scripted", "code": 500}}\n\n']
        if not faults.no_done and not path.endswith("/messages"):
            events.append(b"data: [DONE]\n\n")
        left = faults.cut_after_bytes
        for event in events:
            if left is not None and len(event) >= left:
                self._write_chunk(event[:left])
                self.close()
                return
            left = None if left is None else left - len(event)
            self._write_chunk(event)
            if behaviour.chunk_delay_s:
                await asyncio.sleep(behaviour.chunk_delay_s)
        self._transport.write(b"0\r\n\r\n")

    def _send_json(self, status: int, body: Mapping[str, Any]) -> None:
        self._write(status, b"application/json", orjson.dumps(body))

    def _write(self, status: int, kind: bytes, payload: bytes, more: bytes = b"") -> None:
        assert self._transport is not None
        cut = self._engine.behaviour.faults.cut_after_bytes
        self._transport.write(
            b"HTTP/1.1 %d X\r\n%bcontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (status, more + self._limits(), kind, len(payload), payload[:cut])
        )
        if cut is not None and cut < len(payload):
            self.close()

    def _limits(self) -> bytes:
        told = self._engine.behaviour.faults.limits
        return "".join(f"{name}: {value}\r\n" for name, value in told).encode()

    def _write_chunk(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing() and data:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _dumps(body: Mapping[str, Any]) -> bytes:
    """JSON as an engine written in Python emits it: NaN is written as such."""
    payload = orjson.dumps(body)
    return json.dumps(body).encode() if b'"logprob":null' in payload or b"[null" in payload else payload


def main(arguments: list[str] | None = None, on_ready: Callable[[str], None] | None = None) -> None:
    """Run until interrupted."""
    parser = argparse.ArgumentParser(description="A fake engine in the wire format of vLLM's server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", action="append", default=[], help="what /v1/models lists")
    parser.add_argument("--text", default="ok", help="what it says")
    parser.add_argument("--tokens", type=int, default=None, help="number of completion tokens, instead of the text's")
    parser.add_argument("--canned", action="store_true", help="give every unstreamed request the same bytes")
    parser.add_argument("--format", choices=("vllm", "sglang", "openai"), default="vllm", help="whose server it is")
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--chunk-delay-s", type=float, default=0.0)
    options = parser.parse_args(arguments)
    reply = Reply(text=options.text, num_tokens=options.tokens)
    behaviour = Behaviour(
        reply=lambda body: reply, delay_s=options.delay_s, chunk_delay_s=options.chunk_delay_s,
        models=tuple(options.model), canned=options.canned, format=options.format,
    )  # fmt: skip

    async def run() -> None:
        engine = FakeEngine(behaviour, host=options.host, port=options.port)
        await engine.start()
        (on_ready or _announce)(engine.url)
        await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(run())


def _announce(url: str) -> None:
    print(url, flush=True)


if __name__ == "__main__":
    main()
