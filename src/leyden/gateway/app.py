"""The gateway as an ASGI application, and the process that serves it.

Model calls take a short road on bare ASGI, since they are the hot path; everything else goes through
Starlette. No torch in this process. `serve` blocks until it is told to stop; `Gateway` (in `road`) is what
the parts share.
"""

import asyncio
import gc
import logging
import math
import os
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from leyden.base.config import Config
from leyden.base.errors import ConfigError
from leyden.gateway import health, operations, otlp, routes, v1
from leyden.gateway.address import Address, read_address
from leyden.gateway.auth import Keys, make_token
from leyden.gateway.client import AsgiClient, Client
from leyden.gateway.connection import bounded
from leyden.gateway.control import CARRY
from leyden.gateway.egress import host_of
from leyden.gateway.forward import forward
from leyden.gateway.health import Health
from leyden.gateway.hold import Hold
from leyden.gateway.holdout import holdout_guard
from leyden.gateway.prompts import Prompts
from leyden.gateway.providers import BASE_URLS
from leyden.gateway.road import Arrival, Gateway
from leyden.gateway.routing import Router
from leyden.gateway.siblings import Siblings
from leyden.gateway.upstream import Upstream
from leyden.store.aio import Quay
from leyden.store.base import Store
from leyden.traces.reader import Reader
from leyden.traces.recorder import Recorder

log = logging.getLogger("leyden.gateway")

KEEP_ALIVE_S = 120
"""Idle client connections are kept longer than SDKs keep theirs (httpx: 5 s), so that the client closes
first."""


GC_THRESHOLDS = (20_000, 20, 50)
"""An answer is parsed into hundreds of objects that reference counting alone frees; with Python's default (700) the
cycle collector walks over them several times per call."""


@dataclass(frozen=True, slots=True)
class Listening:
    """What a gateway that listens tells whoever started it."""

    url: str
    """Where it listens."""
    admin_key: str
    """Of the administrator."""
    runner_key: str
    """Of the runner."""

    def __repr__(self) -> str:
        return f"Listening({self.url})"


def create_gateway(
    config: Config, store: Store, *, recorder: Recorder | None = None, admin_key: str | None = None,
    runner_key: str | None = None, siblings: Siblings | None = None,
) -> tuple[Gateway, Listening]:  # fmt: skip
    """The shared parts, and the keys. `recorder` carries a privacy policy; without one everything is kept.

    The administrator's key is `admin_key`, else what `gateway.admin_key_env` names, else a random one.
    """
    admin_key = admin_key or os.environ.get(config.gateway.admin_key_env) or make_token()
    runner_key = runner_key or make_token()
    known = Health(config.gateway.eject_after)
    gateway = Gateway(
        config=config,
        store=store,
        recorder=recorder or Recorder(store),
        reader=Reader(store),
        keys=Keys(store, admin_key=admin_key, runner_key=runner_key),
        router=Router(config, store, known),
        upstream=Upstream(known, trusted=_trusted(config), allowed=config.gateway.engine_hosts),
        hold=Hold(config.gateway.hold_timeout_s),
        siblings=siblings,
        guard=holdout_guard(config),
        prompts=Prompts(store),
        quay=Quay(store),
    )
    gateway.metrics.attach(gateway)
    return gateway, Listening("", admin_key, runner_key)


def _trusted(config: Config) -> set[str]:
    """Hosts that the configuration names: whoever writes it may connect anywhere."""
    engines = {host_of(policy.engine) for policy in config.policies.values() if policy.engine}
    urls = [settings.base_url or BASE_URLS[settings.kind] for settings in config.providers.values()]
    return engines | {host_of(url) for url in urls}


class App:
    """ASGI: model calls to `forward`, the rest to Starlette. `connection` takes most model calls past ASGI."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        parts = (v1, otlp, operations, routes)  # the last one answers what nothing else did
        self._rest = Starlette(routes=[r for part in parts for r in part.routes(gateway)], lifespan=self._lifespan)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["method"] == "POST":
            address = read_address(scope["path"])
            if address is not None:
                await self.call(address, scope["headers"], AsgiClient(receive, send))
                return
        await self._rest(scope, receive, send)

    async def call(self, address: Address, headers: Sequence[tuple[bytes, bytes]], client: Client) -> None:
        """Answer one model call; `headers` have names in lower case."""
        key, retry_count, from_sdk, live_headers = _read_headers(headers)
        arrival = Arrival(
            address=address, key=key, retry_count=retry_count, from_sdk=from_sdk, client=client,
            started_at=time.time(), began=time.monotonic(), live_headers=live_headers,
        )  # fmt: skip
        try:
            await forward(self._gateway, arrival)
        except Exception:
            # The boundary of a request: a fault of ours is told as one, and its trace logged without body or
            # key.
            log.exception("a model call failed inside the gateway")
            if not client.started:
                message = "the gateway failed; its log has the reason"
                await client.json(500, address.dialect.error_body(message, "internal_error", None, None))

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        gateway = self._gateway
        tasks = [asyncio.create_task(health.watch(gateway))]
        if gateway.siblings is not None:
            await gateway.siblings.start(gateway, CARRY)
            tasks.append(asyncio.create_task(gateway.siblings.watch()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await gateway.upstream.close()


def create_app(gateway: Gateway) -> App:
    """The ASGI application."""
    return App(gateway)


def serve(
    config: Config,
    store: Store,
    *,
    recorder: Recorder | None = None,
    admin_key: str | None = None,
    runner_key: str | None = None,
    on_ready: Callable[[Listening], None] | None = None,
    stop: Callable[[Callable[[], None]], None] | None = None,
    siblings: Siblings | None = None,
) -> None:
    """Serve until interrupted. Raises ConfigError if the address cannot be listened on, or for a bad certificate.

    `on_ready` is called once with the URL and the keys. `stop` is called once, before that, with a function
    that ends the server from any thread. With `siblings` the port is shared with the other workers.
    """
    settings = config.gateway
    tls = tls_files(config)
    listener = listen(settings.host, settings.port, shared=siblings is not None)
    gateway, keys = create_gateway(
        config, store, recorder=recorder, admin_key=admin_key, runner_key=runner_key, siblings=siblings
    )
    listening = Listening(url_of(listener, config), keys.admin_key, keys.runner_key)
    app = create_app(gateway)
    server = _Server(
        uvicorn.Config(
            app, http=bounded(settings.client_timeout_s, app.call), loop="uvloop", ws="none", lifespan="on",
            access_log=False, log_config=None, server_header=False, date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=math.ceil(settings.shutdown_timeout_s) + 3,
            ssl_certfile=tls[0], ssl_keyfile=tls[1],
        ),
        gateway,
        (lambda: on_ready(listening)) if on_ready is not None else None,
    )  # fmt: skip
    if stop is not None:
        stop(server.stop)
    gc.set_threshold(*GC_THRESHOLDS)
    with listener:
        server.run([listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, gateway: Gateway, on_ready: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let calls in flight end, for a while; then stop them, so that what came of them is recorded."""
        limit_s = self._gateway.config.gateway.shutdown_timeout_s
        timer = asyncio.get_running_loop().call_later(limit_s, self._abort)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            # uvicorn sends itself the signal again when it is done; after an orderly end the process goes on to
            # close the store and exits with 0.
            self._captured_signals = [n for n in self._captured_signals if n != signal.SIGTERM]

    def _abort(self) -> None:
        for flight in list(self._gateway.flights):
            flight.abort("the gateway was shut down")

    def stop(self) -> None:
        """End from any thread."""
        self.should_exit = True


def url_of(listener: socket.socket, config: Config) -> str:
    """The URL under which a socket of ours is reached."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if config.gateway.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def tls_files(config: Config) -> tuple[str | None, str | None]:
    """Files of certificate and key, checked; None without TLS. Raises ConfigError."""
    if not config.gateway.tls_cert:
        return None, None
    cert, key = (str(config.resolve(path)) for path in (config.gateway.tls_cert, config.gateway.tls_key))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"gateway.tls_cert {cert} and gateway.tls_key {key} cannot be used ({error}); give a PEM chain and the "
            "key that belongs to it"
        ) from error
    return cert, key


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket, `shared` with other processes that bind the same port so. Raises ConfigError that names the port
    if it is taken or cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"gateway.port {port} on {host} cannot be listened on: {error.strerror or error}; "
            "stop what uses it, or set gateway.port = 0 to take a free one"
        ) from error
    listener.set_inheritable(False)
    return listener


def _read_headers(headers: Sequence[tuple[bytes, bytes]]) -> tuple[bytes | None, int, bool, dict[bytes, bytes]]:
    """(key, retry number, whether an SDK that retries sent it, headers `x-leyden-*`). What is no number counts as no
    retry."""
    key: bytes | None = None
    retry_count, from_sdk = 0, False
    live: dict[bytes, bytes] = {}
    for name, value in headers:
        if name == b"authorization":
            if value[:7].lower() == b"bearer ":
                key = value[7:].strip()
        elif name == b"x-api-key":
            key = key or value.strip()
        elif name == b"x-stainless-retry-count":
            from_sdk = True
            retry_count = int(value) if value.isdigit() and len(value) < 10 else 0
        elif name.startswith(b"x-leyden-"):
            live[name] = value
    return key, retry_count, from_sdk, live
