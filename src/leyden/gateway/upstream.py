"""The client side of the gateway: one HTTP session towards engines, in the wire format of vLLM's server.

A sampled call is never blindly sent again. What may be repeated, because nothing was sampled, is a refused
connection and an answer 429 or 503 before any byte; a time-out or a broken connection may not.

What an engine can return is probed once per engine and dialect, with a request of one token, before the first
call.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

from leyden.base.errors import EngineError, EngineIncapable, EngineUnreachable
from leyden.gateway.dialects.base import Body, Dialect
from leyden.gateway.routing import Route
from leyden.gateway.stream import read_json

CONNECT_PATIENCE_S = 20.0
"""How long a refused connection is tried again: an engine that restarts is back by then, a wrong URL never
is."""
BACKOFF_S, BACKOFF_MAX_S = 0.05, 2.0
"""First pause between two tries, doubled each time, and the longest."""
KEEP_ALIVE_S = 3.0
"""Idle connections are dropped before uvicorn engines drop them (5 s), so that no request meets a closing
one."""
PROBE_TIMEOUT_S = 60.0
"""An engine that has just started may compile before its first token."""
_BUSY = frozenset({429, 503})


class Upstream:
    """The session and what is known about engines."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._names: dict[tuple[str, str], str] = {}
        self._listings: dict[str, frozenset[str]] = {}
        self._capable: set[tuple[str, str]] = set()
        self._probing: dict[tuple[str, str], asyncio.Lock] = {}

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def forget(self) -> None:
        """Look again at what engines list, because one was registered or weights changed."""
        self._listings.clear()

    async def post(
        self, route: Route, path: str, body: Body, *, deadline: float, headers: dict[str, str] | None = None
    ) -> aiohttp.ClientResponse:
        """The engine's answer, its body not yet read. `path` is below `v1/` unless it begins with a slash;
        `deadline` is on the monotonic clock.

        Raises EngineUnreachable, or EngineError when the time is over.
        """
        payload = orjson.dumps(body)
        url = f"{route.endpoint}{path}" if path.startswith("/") else f"{route.endpoint}/v1/{path}"
        sent = {"content-type": "application/json", **(headers or {})}
        if route.key:
            sent["authorization"] = f"Bearer {route.key}"
        pause_s = BACKOFF_S
        began = time.monotonic()
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise EngineError(f"engine {route.endpoint} did not take the call before its deadline")
            may_wait = left_s > pause_s
            try:
                response = await self._open().post(
                    url, data=payload, headers=sent, timeout=aiohttp.ClientTimeout(total=left_s)
                )
            except aiohttp.ClientConnectorError as error:
                if not may_wait or time.monotonic() - began + pause_s > CONNECT_PATIENCE_S:
                    raise EngineUnreachable(f"engine {route.endpoint} refuses connections: {error}") from error
            except TimeoutError as error:
                raise EngineError(f"engine {route.endpoint} did not answer within {left_s:.0f} s") from error
            except aiohttp.ClientError as error:
                raise EngineUnreachable(
                    f"engine {route.endpoint} closed the connection before an answer: {_why(error)}"
                ) from error
            else:
                if response.status not in _BUSY or not may_wait:
                    return response
                response.release()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACKOFF_MAX_S)

    async def name(self, route: Route) -> str:
        """The name under which the engine serves the route: the first of `route.names` that it lists, else
        the first."""
        known = self._names.get((route.endpoint, route.names[0]))
        if known is None:
            listing = await self._listing(route)
            known = next((name for name in route.names if name in listing), route.names[0])
            self._names[route.endpoint, route.names[0]] = known
            while len(self._names) > 1000:  # versions go by, so their names must not pile up
                del self._names[next(iter(self._names))]
        return known

    async def require(self, route: Route, dialect: Dialect, model: str) -> None:
        """Raises EngineIncapable if a trainable policy's engine does not return token ids and
        log-probabilities."""
        slot = (route.endpoint, dialect.engine_path)
        if not route.trainable or slot in self._capable:
            return
        async with self._probing.setdefault(slot, asyncio.Lock()):
            if slot in self._capable:
                return
            missing = await self._probe(route, dialect, model)
            if missing:
                raise EngineIncapable(
                    f"engine {route.endpoint} does not return {' and '.join(missing)}; a trainable policy "
                    "needs them. Use a server that honours return_token_ids and logprobs (vLLM 0.10.2 or "
                    f"later does), or set policies.{route.policy}.trainable = false"
                )
            self._capable.add(slot)

    async def _probe(self, route: Route, dialect: Dialect, model: str) -> Sequence[str]:
        response = await self.post(
            route, dialect.engine_path, dialect.probe_body(model), deadline=time.monotonic() + PROBE_TIMEOUT_S,
            headers={"x-leyden-probe": "1"},
        )  # fmt: skip
        async with response:
            if response.status != 200:
                # The engine refuses the probe itself, which says nothing; the call brings its own answer.
                return ()
            answer = read_json(await read(response, route))
        if not isinstance(answer, dict):
            return ("JSON (it answered something else)",)
        capture = dialect.capture(answer)
        choices = capture.choices
        found = {
            "prompt_token_ids (flag return_token_ids)": bool(capture.prompt_ids),
            "token_ids (flag return_token_ids)": all(choice.completion_ids is not None for choice in choices),
            "log-probabilities (flag logprobs)": all(choice.logprobs is not None for choice in choices),
        }
        return [what for what, there in found.items() if not there]

    async def _listing(self, route: Route) -> frozenset[str]:
        """Names that the engine lists; empty if it does not tell. A listing is a courtesy, so its failure is
        no error."""
        known = self._listings.get(route.endpoint)
        if known is None or not known.intersection(route.names):
            headers = {"authorization": f"Bearer {route.key}"} if route.key else {}
            known = frozenset()
            try:
                async with self._open().get(
                    f"{route.endpoint}/v1/models", headers=headers, timeout=aiohttp.ClientTimeout(total=10)
                ) as response:
                    listed: Any = read_json(await response.read())
                    if response.status == 200 and isinstance(listed, dict):
                        known = frozenset(str(entry.get("id")) for entry in listed.get("data") or ())
            except (aiohttp.ClientError, TimeoutError):
                pass
            self._listings[route.endpoint] = known
        return known

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=True,
                skip_auto_headers=("user-agent", "accept-encoding"),
                read_bufsize=2**18,
            )
        return self._session


async def read(response: aiohttp.ClientResponse, route: Route) -> bytes:
    """The whole body. Raises EngineUnreachable if it breaks off, EngineError when the time is over."""
    try:
        return await response.read()
    except TimeoutError as error:
        raise EngineError(f"engine {route.endpoint} did not finish its answer before the deadline") from error
    except aiohttp.ClientError as error:
        raise EngineUnreachable(f"engine {route.endpoint} broke off its answer: {_why(error)}") from error


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
