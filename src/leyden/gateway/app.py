"""The gateway as an ASGI application, and the process that serves it.

Model calls take a short road on bare ASGI, since they are the hot path; everything else goes through
Starlette. No torch in this process. `serve` blocks until it is told to stop; `Gateway` (in `road`) is what
the parts share.
"""

import gc
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from leyden.base.config import Config
from leyden.base.errors import ConfigError
from leyden.gateway import routes, v1
from leyden.gateway.address import Address, read_address
from leyden.gateway.auth import Keys, make_token
from leyden.gateway.client import Client
from leyden.gateway.forward import forward
from leyden.gateway.hold import Hold
from leyden.gateway.prompts import Prompts
from leyden.gateway.road import Arrival, Gateway
from leyden.gateway.routing import Router
from leyden.gateway.upstream import Upstream
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
    runner_key: str | None = None,
) -> tuple[Gateway, Listening]:  # fmt: skip
    """The shared parts, and the keys. `recorder` carries a privacy policy; without one everything is kept.

    The administrator's key is `admin_key`, else what `gateway.admin_key_env` names, else a random one.
    """
    admin_key = admin_key or os.environ.get(config.gateway.admin_key_env) or make_token()
    runner_key = runner_key or make_token()
    gateway = Gateway(
        config=config,
        store=store,
        recorder=recorder or Recorder(store),
        reader=Reader(store),
        keys=Keys(store, admin_key=admin_key, runner_key=runner_key),
        router=Router(config, store),
        upstream=Upstream(),
        hold=Hold(config.gateway.hold_timeout_s),
        prompts=Prompts(store),
    )
    return gateway, Listening("", admin_key, runner_key)


class App:
    """ASGI: model calls to `forward`, the rest to Starlette."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._rest = Starlette(routes=[*v1.routes(gateway), *routes.routes(gateway)], lifespan=self._lifespan)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["method"] == "POST":
            address = read_address(scope["path"])
            if address is not None:
                await self._call(address, scope, receive, send)
                return
        await self._rest(scope, receive, send)

    async def _call(self, address: Address, scope: Scope, receive: Receive, send: Send) -> None:
        key, retry_count, from_sdk = _read_headers(scope["headers"])
        client = Client(receive, send)
        arrival = Arrival(
            address=address, key=key, retry_count=retry_count, from_sdk=from_sdk, client=client,
            started_at=time.time(), began=time.monotonic(),
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
        yield
        await self._gateway.upstream.close()


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
) -> None:
    """Serve until interrupted. Raises ConfigError if the address cannot be listened on.

    `on_ready` is called once with the URL and the keys. `stop` is called once, before that, with a function
    that ends the server from any thread.
    """
    listener = listen(config.gateway.host, config.gateway.port)
    gateway, keys = create_gateway(config, store, recorder=recorder, admin_key=admin_key, runner_key=runner_key)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    listening = Listening(f"http://{shown}:{port}", keys.admin_key, keys.runner_key)
    server = _Server(
        uvicorn.Config(
            create_app(gateway), http="httptools", loop="uvloop", ws="none", lifespan="on", access_log=False,
            log_config=None, server_header=False, date_header=False, timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=5,
        ),
        (lambda: on_ready(listening)) if on_ready is not None else None,
    )  # fmt: skip
    if stop is not None:
        stop(server.stop)
    gc.set_threshold(*GC_THRESHOLDS)
    with listener:
        server.run([listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None] | None) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    def stop(self) -> None:
        """End from any thread."""
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises ConfigError that names the port if it is taken or cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


def _read_headers(headers: list[tuple[bytes, bytes]]) -> tuple[bytes | None, int, bool]:
    """(key, retry number, whether an SDK that retries sent it). What is no number counts as no retry."""
    key: bytes | None = None
    retry_count, from_sdk = 0, False
    for name, value in headers:
        if name == b"authorization":
            if value[:7].lower() == b"bearer ":
                key = value[7:].strip()
        elif name == b"x-api-key":
            key = key or value.strip()
        elif name == b"x-stainless-retry-count":
            from_sdk = True
            retry_count = int(value) if value.isdigit() else 0
    return key, retry_count, from_sdk
