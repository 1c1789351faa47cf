"""The embedded engine over loopback HTTP: Starlette on uvicorn in a background thread, in vLLM's wire format.

Promises: a random bearer key; a model name other than the version served now is a 404, so stale weights can
never answer; usage is exact; a client that goes away frees its slots at the next step; a stream carries what
a step gave, not one task per token. It binds to 127.0.0.1 only. `/health` needs no key.
"""

import asyncio
import hmac
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from leyden.base.errors import LearningError, LeydenError, RequestRefused
from leyden.learning.backends.embedded.chat import ChatFormat
from leyden.learning.backends.embedded.requests import Delta, SamplingRequest, Ticket
from leyden.learning.backends.embedded.sampler import Sampler
from leyden.learning.backends.embedded.splice import Splicer, Turn
from leyden.learning.backends.embedded.thinking import Speech, Thinks, style_of
from leyden.learning.backends.embedded.wire import Answer, Piece, Wishes, error_body, read, tools_of

START_TIMEOUT_S = 30.0  # that `start` waits for the server to listen
ATTEMPT_HEADER = "x-leyden-attempt"
"""Says which attempt a chat request belongs to; only with splicing."""
MAX_CHOICES = 1024
"""Most choices of one request, over all its prompts."""


@dataclass(slots=True, eq=False)
class _Mailbox:
    """Deltas of one request on the event loop's side."""

    deltas: deque[Delta] = field(default_factory=deque)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    tickets: list[Ticket] = field(default_factory=list)

    def cancel(self) -> None:
        for ticket in self.tickets:
            ticket.cancel()


class _Post:
    """Carries deltas from the sampler's thread to the event loop: one wake-up per step, not per delta."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: deque[tuple[_Mailbox, Delta]] = deque()
        self._scheduled = False

    def bind(self) -> None:
        self._loop = asyncio.get_running_loop()

    def drop(self, mailbox: _Mailbox, delta: Delta) -> None:
        self._pending.append((mailbox, delta))
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                # The loop is closed: the server stopped before the sampler, and nobody listens any more.
                self._pending.clear()

    def _deliver(self) -> None:
        # Cleared first: a delta that arrives during the loop below schedules a delivery of its own at worst.
        self._scheduled = False
        while self._pending:
            mailbox, delta = self._pending.popleft()
            mailbox.deltas.append(delta)
            mailbox.ready.set()


@dataclass(slots=True)
class _Job:
    """One request between reading and answering."""

    answer: Answer
    requests: list[SamplingRequest]
    num_choices: int
    parser: str
    headers: dict[str, str]
    turn: Turn | None
    thinks: Thinks


class EngineServer:
    """Serves one sampler as `policy@version`."""

    def __init__(
        self,
        policy: str,
        sampler: Sampler,
        chat: ChatFormat,
        *,
        tool_parser: str,
        default_max_tokens: int,
        splicer: Splicer | None = None,
    ) -> None:
        self.policy, self.sampler, self.chat, self.splicer = policy, sampler, chat, splicer
        self.tool_parser, self.default_max_tokens = tool_parser, default_max_tokens
        self.key = secrets.token_urlsafe(24)
        self.url = ""
        self.num_malformed_tool_calls = 0
        """Blocks in tool tags that stayed text since the start."""
        self._post = _Post()
        self._token_texts: dict[int, str] = {}
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def model(self) -> str:
        """The model name served now."""
        return f"{self.policy}@{self.sampler.version}"

    def start(self) -> str:
        """Listen on a free port; the URL, without `/v1`. Raises LearningError if it does not come up."""
        assert self._thread is None, "started twice"
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            self._app(), log_level="error", access_log=False, lifespan="off", ws="none", backlog=2048,
            timeout_graceful_shutdown=1, timeout_keep_alive=60,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, name="leyden-engine", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise LearningError(f"the embedded engine did not listen on 127.0.0.1 within {START_TIMEOUT_S:.0f} s")
            time.sleep(0.005)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        return self.url

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        self._thread.join(10)
        if self._thread.is_alive():
            raise LearningError("waited 10 s for the embedded engine's server to stop")

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._guard(self._models)),
                Route("/v1/chat/completions", self._guard(self._chat_completions), methods=["POST"]),
                Route("/v1/completions", self._guard(self._completions), methods=["POST"]),
                Route("/tokenize", self._guard(self._tokenize), methods=["POST"]),
            ]
        )

    def _guard(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
                return _refuse(RequestRefused("the key is missing or wrong", status=401, kind="invalid_api_key"))
            try:
                return await handler(request)
            except RequestRefused as error:
                return _refuse(error)
            except LeydenError as error:
                return _refuse(RequestRefused(str(error), status=503, kind="engine_unavailable"))
            except ClientDisconnect:
                return Response(status_code=499)

        return guarded

    async def _health(self, request: Request) -> Response:
        return Response(b"{}", media_type="application/json")

    async def _models(self, request: Request) -> Response:
        entry = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "leyden",
            "root": self.policy,
            "max_model_len": self.sampler.loaded.max_context,
        }
        return _json({"object": "list", "data": [entry]})

    async def _chat_completions(self, request: Request) -> Response:
        body, version = await self._body(request)
        wishes, make = read(body, chat=True, default_max_tokens=self.default_max_tokens, version=version)
        tools, choice = tools_of(body), body.get("tool_choice")
        asked = (body.get("messages"), tools, choice, style_of(body))
        # Rendering and encoding a long conversation takes milliseconds, in which other clients should be heard.
        attempt = request.headers.get(ATTEMPT_HEADER, "")
        turn: Turn | None = None
        if self.splicer is not None and attempt:
            prepared = await asyncio.to_thread(self.splicer.prepare, attempt, *asked)
            turn, prompt = Turn(self.splicer, attempt, prepared), prepared.prompt
        else:
            prompt = await asyncio.to_thread(self.chat.encode, *asked)
        headers = {"x-leyden-template": prompt.template_hash, "x-leyden-rendering": prompt.rendering}
        parser = self.tool_parser if tools and choice != "none" else "none"
        return await self._answer(request, body, wishes, [prompt.ids], make, parser, headers, turn, prompt.thinks)

    async def _completions(self, request: Request) -> Response:
        body, version = await self._body(request)
        wishes, make = read(body, chat=False, default_max_tokens=self.default_max_tokens, version=version)
        prompts = await asyncio.to_thread(self._prompts, body.get("prompt"))
        return await self._answer(request, body, wishes, prompts, make, "none", {})

    async def _tokenize(self, request: Request) -> Response:
        """How many tokens a chat would be, as vLLM's server tells it."""
        body, _ = await self._body(request)
        prompt = await asyncio.to_thread(self.chat.encode, body.get("messages"), tools_of(body), None, style_of(body))
        longest = self.sampler.loaded.max_context
        return _json({"count": len(prompt.ids), "max_model_len": longest, "tokens": prompt.ids})

    async def _body(self, request: Request) -> tuple[dict[str, Any], int]:
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError as error:
            raise RequestRefused(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise RequestRefused(f"the body is a JSON {type(body).__name__}; send an object")
        version = self.sampler.version
        if body.get("model") != f"{self.policy}@{version}":
            raise RequestRefused(
                f"model {body.get('model')!r} is not served; {self.model!r} is",
                status=404,
                kind="model_not_found",
                field="model",
            )
        return body, version

    def _prompts(self, prompt: Any) -> list[list[int]]:
        """Ids of each prompt of a completions request."""
        encode = self.sampler.loaded.encode
        if isinstance(prompt, str):
            return [encode(prompt, special=True)]
        if isinstance(prompt, list) and prompt:
            if all(isinstance(item, str) for item in prompt):
                return [encode(item, special=True) for item in prompt]
            if _is_ids(prompt):
                return [prompt]
            if all(_is_ids(item) for item in prompt):
                return prompt
        raise RequestRefused("prompt must be a string, a list of token ids, or a list of either", field="prompt")

    async def _answer(
        self,
        request: Request,
        body: dict[str, Any],
        wishes: Wishes,
        prompts: list[list[int]],
        make: Callable[[Sequence[int]], SamplingRequest],
        parser: str,
        headers: dict[str, str],
        turn: Turn | None = None,
        thinks: Thinks = "no",
    ) -> Response:
        requests = [make(ids) for ids in prompts]
        num_choices = sum(r.num_choices for r in requests)
        if num_choices > MAX_CHOICES:
            raise RequestRefused(f"{num_choices} choices are more than {MAX_CHOICES}; send fewer prompts", field="n")
        answer = Answer(wishes, body["model"], prompts, self._token_text)
        answer.is_spliced = turn is not None and turn.prepared.skip is None
        job = _Job(answer, requests, num_choices, parser, headers, turn, thinks)
        mailbox = self._send(job)
        if wishes.stream:
            return StreamingResponse(self._stream(job, mailbox), media_type="text/event-stream", headers=headers)
        return await self._whole(request, job, mailbox)

    def _send(self, job: _Job) -> _Mailbox:
        self._post.bind()
        mailbox = _Mailbox()
        try:
            for p, wanted in enumerate(job.requests):
                first = p * wanted.num_choices
                mailbox.tickets.append(self.sampler.submit(wanted, self._sink(mailbox, first)))
        except LeydenError:
            mailbox.cancel()
            raise
        return mailbox

    def _sink(self, mailbox: _Mailbox, first: int) -> Callable[[Delta], None]:
        def sink(delta: Delta) -> None:
            if first:
                delta = replace(delta, choice=first + delta.choice)
            self._post.drop(mailbox, delta)

        return sink

    async def _whole(self, request: Request, job: _Job, mailbox: _Mailbox) -> Response:
        left = asyncio.ensure_future(_gone(request))
        left.add_done_callback(lambda task: mailbox.cancel())
        try:
            deltas: dict[int, Delta] = {}
            while len(deltas) < job.num_choices:
                await mailbox.ready.wait()
                mailbox.ready.clear()
                while mailbox.deltas:
                    delta = mailbox.deltas.popleft()
                    if delta.error is not None:
                        raise delta.error
                    deltas[delta.choice] = delta
        finally:
            left.cancel()
            mailbox.cancel()
        pieces = [self._piece(job, deltas[i], Speech(job.parser, job.thinks)) for i in range(job.num_choices)]
        return _json(job.answer.whole(pieces), headers=job.headers)

    async def _stream(self, job: _Job, mailbox: _Mailbox) -> AsyncIterator[bytes]:
        answer = job.answer
        streams = [Speech(job.parser, job.thinks) for _ in range(job.num_choices)]
        num_open, num_sampled = job.num_choices, 0
        try:
            if answer.wishes.chat:
                yield b"".join(_event(answer.opening(i)) for i in range(job.num_choices))
            while num_open:
                await mailbox.ready.wait()
                mailbox.ready.clear()
                events: list[bytes] = []
                while mailbox.deltas:
                    delta = mailbox.deltas.popleft()
                    if delta.error is not None:
                        yield b"".join(events) + _event(error_body(_as_refusal(delta.error)))
                        return
                    num_sampled += len(delta.ids)
                    num_open -= delta.finish_reason is not None
                    piece = self._piece(job, delta, streams[delta.choice])
                    events.append(_event(answer.chunk(piece, job.num_choices)))
                yield b"".join(events)
            if answer.wishes.include_usage:
                yield _event(answer.closing(num_sampled))
            yield b"data: [DONE]\n\n"
        finally:
            # Also on GeneratorExit: the client has gone, so its slots are wanted by others.
            mailbox.cancel()

    def _piece(self, job: _Job, delta: Delta, speech: Speech) -> Piece:
        thought, parsed = speech.push(delta.text, last=delta.finish_reason is not None)
        piece = Piece(delta.choice, parsed.content, parsed.calls, delta.ids, delta.logprobs, reasoning=thought)
        piece.finish_reason, piece.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.finish_reason is not None:
            self.num_malformed_tool_calls += speech.tools.num_malformed
            if speech.tools.num_calls and delta.finish_reason == "stop":
                piece.finish_reason = "tool_calls"
        if job.turn is not None:
            job.turn.hear(piece)
        return piece

    def _token_text(self, token: int) -> str:
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = self.sampler.loaded.decode([token])
        return text


async def _gone(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _as_refusal(error: LeydenError) -> RequestRefused:
    if isinstance(error, RequestRefused):
        return error
    return RequestRefused(str(error), status=503, kind="engine_unavailable")


def _refuse(error: RequestRefused) -> Response:
    return _json(error_body(error), status=error.status)


def _json(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


def _event(body: Any) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
