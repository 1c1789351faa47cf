"""The client side of the gateway: connections towards engines and providers (their formats are in `providers`), with
`plain_http` for calls without TLS and aiohttp for everything else.

A sampled call is never blindly sent again. What may be repeated, because nothing was sampled, is a refused
connection and an answer 429 or 503 before any byte; a time-out or a broken connection may not.

What an engine can return is probed once per engine and dialect, with a request of one token, before the first
call.
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from leyden.base.errors import EngineError, EngineIncapable, EngineUnreachable
from leyden.gateway.dialects.base import Body, Dialect, ModelRequest
from leyden.gateway.egress import GuardedResolver
from leyden.gateway.health import Health
from leyden.gateway.plain_http import KEEP_S, Pool, target_of
from leyden.gateway.providers import PLAIN, Headed, Response, Translated, cost_usd
from leyden.gateway.providers.faults import BUSY, fault_of, late, retry_after_of
from leyden.gateway.routing import Route
from leyden.gateway.stream import read_json

CONNECT_PATIENCE_S = 20.0
"""How long a refused connection is tried again: an engine that restarts is back by then, a wrong URL never
is."""
BACKOFF_S, BACKOFF_MAX_S = 0.05, 2.0
"""First pause between two tries, doubled each time, and the longest."""
PROVIDER_PATIENCE_S = 20.0
"""How long a provider that is busy is waited for; then the client is told, whose SDK waits and comes back."""
PROBE_TIMEOUT_S = 60.0
"""An engine that has just started may compile before its first token."""
LISTING_TIMEOUT_S = 10.0
"""How long an engine may take to list its models; without the list it is asked under the route's own name."""
LISTING_AGAIN_S = 30.0
"""How long a listing that failed stands for an empty one. An engine that is only busy soon tells, and one that hangs
must not hold every call for LISTING_TIMEOUT_S."""
_BUSY = frozenset({429, 503})
BROKEN = (aiohttp.ClientError, ConnectionError)
"""What a connection raises that broke, of either kind."""


class Upstream:
    """The session and what is known about engines."""

    def __init__(
        self, health: Health | None = None, *, trusted: Collection[str] = (), allowed: Sequence[str] = ()
    ) -> None:
        """`trusted` hosts may be anywhere, others only where `egress` allows with the patterns `allowed`."""
        self.health = health or Health(eject_after=3)
        self._resolver = (frozenset(trusted), tuple(allowed))
        self._session: aiohttp.ClientSession | None = None
        self._pool: Pool | None = None
        self._names: dict[tuple[str, str], str] = {}
        self._listings: dict[str, frozenset[str]] = {}
        self._unlisted: dict[str, float] = {}
        self._listing_turn: dict[str, asyncio.Lock] = {}
        self._capable: set[tuple[str, str]] = set()
        self._probing: dict[tuple[str, str], asyncio.Lock] = {}

    async def close(self) -> None:
        """Close every connection."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._session is not None:
            await self._session.close()
            self._session = None

    def forget(self) -> None:
        """Look again at what engines list, because one was registered or weights changed."""
        self._listings.clear()
        self._unlisted.clear()

    async def post(
        self, route: Route, path: str, body: Body, *, deadline: float, headers: dict[str, str] | None = None,
        request: ModelRequest | None = None,
    ) -> Response:  # fmt: skip
        """The engine's answer, its body not yet read. `path` is below `v1/` unless it begins with a slash;
        `deadline` is on the monotonic clock.

        Raises EngineUnreachable, or EngineError when the time is over; ProviderError for whatever a provider answers
        that is no 200.
        """
        wire = route.wire
        if route.provider is not None:
            deadline = min(deadline, time.monotonic() + route.provider.timeout_s)
        streaming = bool(body.get("stream"))
        response = await self._post(route, path, wire.body(path, body, request), deadline, headers)
        if route.provider is not None and response.status != 200:
            raise await self._fault(route, response)
        return response if wire is PLAIN else Translated(response, wire, path, streaming=streaming)

    async def _post(
        self, route: Route, path: str, body: Body, deadline: float, headers: dict[str, str] | None
    ) -> Headed:
        payload = orjson.dumps(body)
        url = route.wire.url(route.endpoint, path)
        sent = {"content-type": "application/json", **(headers or {}), **route.wire.headers(route.key)}
        busy = _BUSY if route.provider is None else BUSY
        pause_s = BACKOFF_S
        began = time.monotonic()
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise EngineError(f"engine {route.endpoint} did not take the call before its deadline")
            may_wait = left_s > pause_s
            try:
                response = await self._ask(url, payload, sent, left_s)
            except (aiohttp.ClientConnectorError, ConnectionRefusedError) as error:
                self.health.failed(route.endpoint, _why(error))
                # With others to go to, the client's retry finds one sooner than this replica comes back.
                elsewhere = route.has_others and not self.health.usable(route.endpoint)
                if elsewhere or not may_wait or time.monotonic() - began + pause_s > CONNECT_PATIENCE_S:
                    raise EngineUnreachable(f"engine {route.endpoint} refuses connections: {error}") from error
            except TimeoutError as error:
                if route.provider is not None:
                    raise late(route.provider) from error
                raise EngineError(f"engine {route.endpoint} did not answer within {left_s:.0f} s") from error
            except BROKEN as error:
                self.health.failed(route.endpoint, _why(error))
                raise EngineUnreachable(
                    f"engine {route.endpoint} closed the connection before an answer: {_why(error)}"
                ) from error
            else:
                self.health.worked(route.endpoint)
                if response.status not in busy or not may_wait:
                    return response
                if route.provider is not None:
                    pause_s = max(pause_s, retry_after_of(response.headers.get("retry-after")) or 0.0)
                    if time.monotonic() - began + pause_s > PROVIDER_PATIENCE_S or pause_s > left_s:
                        return response
                response.release()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACKOFF_MAX_S)

    async def _ask(self, url: str, payload: bytes, headers: Mapping[str, str], timeout_s: float) -> Headed:
        target = target_of(url)
        if target is not None:
            if self._pool is None:
                self._pool = Pool(GuardedResolver(*self._resolver))
            return await self._pool.post(target, payload, headers, timeout_s)
        return await self._open().post(
            url, data=payload, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s), allow_redirects=False
        )

    async def _fault(self, route: Route, response: Headed) -> EngineError:
        assert route.provider is not None
        after_s = retry_after_of(response.headers.get("retry-after"))
        return fault_of(route.provider, response.status, await read(response, route), after_s)

    def check(self, route: Route, dialect: Dialect, request: ModelRequest, used: Mapping[str, Any], model: str) -> None:
        """Raises RequestRefused for what a provider cannot honour, before anything is recorded or sent."""
        if route.provider is not None:
            route.wire.body(dialect.engine_path, dialect.engine_body(request, used, model), request)

    async def name(self, route: Route) -> str:
        """The name under which the engine serves the route: the first of `route.names` that it lists, else
        the first."""
        if not route.wire.lists_models:
            return route.names[0]
        known = self._names.get((route.endpoint, route.names[0]))
        if known is None:
            async with self._listing_turn.setdefault(route.endpoint, asyncio.Lock()):
                listing = await self._listing(route)
            if listing is None:
                return route.names[0]
            known = next((name for name in route.names if name in listing), route.names[0])
            self._names[route.endpoint, route.names[0]] = known
            while len(self._names) > 1000:  # versions go by, so their names must not pile up
                del self._names[next(iter(self._names))]
        return known

    async def require(self, route: Route, dialect: Dialect, model: str, *, remember: bool = True) -> None:
        """Raises EngineIncapable if a trainable policy's engine does not return token ids and
        log-probabilities. With `remember` it is found out once per engine."""
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
                    f"needs them. {route.wire.flags}, or set policies.{route.policy}.trainable = false"
                )
            self.health.replica(route.endpoint).incapable = None
            if remember:
                self._capable.add(slot)

    async def check_replica(self, endpoint: str, key: str, timeout_s: float) -> None:
        """Ask a replica what it lists, and note whether it answered. Never raises."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._open().get(
                f"{endpoint}/v1/models", headers=headers, timeout=limit, allow_redirects=False
            ) as response:
                if response.status < 500:
                    self.health.worked(endpoint)
                else:
                    self.health.failed(endpoint, f"status {response.status}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self.health.failed(endpoint, _why(error))

    async def _probe(self, route: Route, dialect: Dialect, model: str) -> Sequence[str]:
        response = await self.post(
            route, dialect.engine_path, dialect.probe_body(model), deadline=time.monotonic() + PROBE_TIMEOUT_S,
            headers={"x-leyden-probe": "1"},
        )  # fmt: skip
        try:
            if response.status != 200:
                # The engine refuses the probe itself, which says nothing; the call brings its own answer.
                return ()
            answer = read_json(await read(response, route))
        finally:
            response.close() if not response.content.at_eof() else response.release()
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

    async def _listing(self, route: Route) -> frozenset[str] | None:
        """Names that the engine lists; empty if it has no such list, None if it could not be asked, which is tried
        again after a while. A listing is a courtesy, so its failure is no error."""
        known = self._listings.get(route.endpoint)
        if known is not None and known.intersection(route.names):
            return known
        if time.monotonic() < self._unlisted.get(route.endpoint, 0.0):
            return None
        headers = {"authorization": f"Bearer {route.key}"} if route.key else {}
        try:
            async with self._open().get(
                f"{route.endpoint}/v1/models", headers=headers, timeout=aiohttp.ClientTimeout(total=LISTING_TIMEOUT_S),
                allow_redirects=False,
            ) as response:  # fmt: skip
                failed = response.status >= 500 or response.status in _BUSY
                listed: Any = read_json(await response.read()) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError):
            failed, listed = True, None
        if failed:
            self._unlisted[route.endpoint] = time.monotonic() + LISTING_AGAIN_S
            return None
        entries = listed.get("data") or () if isinstance(listed, dict) else ()
        self._listings[route.endpoint] = frozenset(str(entry.get("id")) for entry in entries if isinstance(entry, dict))
        return self._listings[route.endpoint]

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0, keepalive_timeout=KEEP_S, resolver=GuardedResolver(*self._resolver)
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=True,
                skip_auto_headers=("user-agent", "accept-encoding"),
                read_bufsize=2**18,
            )
        return self._session


def priced(route: Route, usage: Mapping[str, Any]) -> Mapping[str, Any]:
    """Usage with `cost_usd` beside the counts, where the route leads to a provider with a price."""
    price = route.provider and route.provider.price
    return {**usage, "cost_usd": cost_usd(price, usage)} if price else usage


async def read(response: Response, route: Route) -> bytes:
    """The whole body. Raises EngineUnreachable if it breaks off, EngineError when the time is over."""
    try:
        return await response.read()
    except TimeoutError as error:
        if route.provider is not None:
            raise late(route.provider) from error
        raise EngineError(f"engine {route.endpoint} did not finish its answer before the deadline") from error
    except BROKEN as error:
        raise EngineUnreachable(f"engine {route.endpoint} broke off its answer: {_why(error)}") from error


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
