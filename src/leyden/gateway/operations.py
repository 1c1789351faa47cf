"""Routes for whoever runs the gateway: metrics, readiness, service keys, replicas.

`/readyz` says without a key whether calls can be answered and why not; addresses of engines it shows to the
administrator only. `/metrics` needs the administrator's or the runner's key, or a service key made for the scraper:
names of policies and amounts of money are in it.
"""

import asyncio
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from leyden.base.errors import RequestRefused
from leyden.gateway import metrics
from leyden.gateway.auth import add_service_key
from leyden.gateway.health import readiness
from leyden.gateway.rest import Json, endpoint, key_of, read_body, require
from leyden.gateway.road import Gateway
from leyden.gateway.routing import DRAINING
from leyden.store import aio, keys, ledger
from leyden.store.keys import ServiceKey


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NewKey(_Body):
    """A service that is to get a key."""

    name: str = Field(min_length=1, max_length=128)


class DrainReplica(_Body):
    """Keep new calls away from a replica, or let them go there again."""

    endpoint: str = Field(min_length=1, max_length=512)
    draining: bool = True


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The routes of this part."""

    def route(path: str, handler: Any, *methods: str, admin: bool | None = True) -> BaseRoute:
        return Route(path, endpoint(gateway, handler, admin=admin), methods=methods)

    return [
        route("/readyz", _ready, "GET", admin=False),
        route("/metrics", _metrics, "GET", admin=False),
        route("/api/keys", _add_key, "POST", admin=None),
        route("/api/keys", _list_keys, "GET", admin=None),
        route("/api/keys/{key_id}", _revoke_key, "DELETE", admin=None),
        route("/api/models/drain", _drain_replica, "POST", admin=None),
    ]


async def _ready(gateway: Gateway, request: Request) -> Response:
    ready, known = await readiness(gateway)
    key = key_of(request)
    if key is None or (await gateway.keys.caller(key)).role != "admin":
        del known["replicas"]
    return Json(known, status_code=200 if ready else 503)


async def _metrics(gateway: Gateway, request: Request) -> Response:
    caller = await gateway.keys.caller(key_of(request))
    if caller.role == "attempt":
        await require(gateway, request)
    if gateway.siblings is None:
        body = metrics.page(gateway)
    else:
        pages = await gateway.siblings.order("metrics", {})
        body = await asyncio.to_thread(metrics.merged, {n: reply["page"] for n, reply in pages.items()})
    return Response(body, media_type=metrics.CONTENT_TYPE)


async def _add_key(gateway: Gateway, request: Request) -> Response:
    name = (await read_body(gateway, request, NewKey)).name
    stored, key = await aio.write(gateway.store, lambda c: add_service_key(c, gateway.store, name))
    return Json({**_key_json(stored), "key": key}, status_code=201)


async def _list_keys(gateway: Gateway, request: Request) -> Response:
    return Json([_key_json(key) for key in await aio.read(gateway.store, keys.every)])


async def _revoke_key(gateway: Gateway, request: Request) -> Response:
    key_id = request.path_params["key_id"]
    await aio.write(gateway.store, lambda connection: keys.revoke(connection, gateway.store, key_id))
    return Response(status_code=204)


def _key_json(key: ServiceKey) -> dict[str, Any]:
    return {"key_id": key.key_id, "name": key.name, "created_at": key.created_at, "revoked_at": key.revoked_at}


async def _drain_replica(gateway: Gateway, request: Request) -> Response:
    asked = await read_body(gateway, request, DrainReplica)
    url = asked.endpoint.rstrip("/").removesuffix("/v1")
    if url not in [known for known, _ in await gateway.router.engines()]:
        raise RequestRefused(
            f"no engine at {url!r} is known", status=404, kind="not_found", field="endpoint",
            hint="GET /api/models lists those that were registered",
        )  # fmt: skip

    def job(connection: Any) -> list[str]:
        before = set(ledger.get_control(connection, DRAINING) or [])
        after = sorted(before | {url} if asked.draining else before - {url})
        ledger.set_control(connection, gateway.store, DRAINING, after)
        gateway.store.changed(connection, ledger.TOPIC)
        return after

    return Json({"draining": await aio.write(gateway.store, job)})
