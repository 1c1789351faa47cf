"""The REST surface that is ours (docs/gateway.md): spans, rewards, traces, policies, steps, models, long poll."""

import asyncio
import time
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from leyden.base.errors import NotFound, RequestRefused
from leyden.base.records import Reward, Span, check_reward, new_id
from leyden.gateway import counting
from leyden.gateway.address import Address
from leyden.gateway.callers import attempt_of
from leyden.gateway.dialects import DIALECTS
from leyden.gateway.refusals import note_refusal
from leyden.gateway.rest import Json, endpoint, error_response, key_of, number, own_attempt, read_body
from leyden.gateway.road import Gateway
from leyden.gateway.v1 import add_rewards
from leyden.store import aio, ledger, queue

MAX_POLL_S = 60.0
"""Longest long poll: proxies in between cut idle connections not much later."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NewSpan(_Body):
    """One span."""

    name: str = Field(min_length=1, max_length=256)
    kind: str = Field("custom", max_length=32)
    attributes: dict[str, Any] = {}
    started_at: float | None = None
    ended_at: float | None = None


class NewReward(_Body):
    """One reward."""

    name: str = Field(min_length=1, max_length=128)
    value: Any
    call_id: str | None = None


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The routes of this part; the last one answers what nothing else did."""

    def route(path: str, handler: Any, *methods: str, admin: bool = True) -> BaseRoute:
        return Route(path, endpoint(gateway, handler, admin=admin), methods=methods)

    attempt = "/api/rollouts/{rollout_id}/attempts/{attempt_id}"
    proxied = "/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}"
    every = ("GET", "POST", "PUT", "PATCH", "DELETE")
    return [
        route(attempt + "/spans", _spans, "POST", admin=False),
        route(attempt + "/rewards", _rewards, "POST", admin=False),
        route("/api/rollouts/{rollout_id}/trace", _trace, "GET"),
        route("/api/watch", _watch, "GET"),
        route("/api/policies", _policies, "GET"),
        route("/api/policies/{name}/versions", _versions, "GET"),
        route("/api/steps", _steps, "GET"),
        *(
            route(prefix + "/v1/models", _models, "GET", admin=False)
            for prefix in ("", "/openai", "/anthropic", proxied, proxied + "/openai", proxied + "/anthropic")
        ),
        *counting.routes(gateway),
        route("/{path:path}", _unknown, *every, admin=False),
    ]


async def _spans(gateway: Gateway, request: Request) -> Response:
    _, rollout_id, attempt_id = await own_attempt(gateway, request)
    new = await read_body(gateway, request, NewSpan)
    span = Span(
        id=new_id("span"), rollout_id=rollout_id, attempt_id=attempt_id, name=new.name, kind=new.kind,
        attributes=new.attributes, started_at=time.time() if new.started_at is None else new.started_at,
        ended_at=new.ended_at,
    )  # fmt: skip
    await asyncio.wrap_future(gateway.recorder.span(span))
    return Json({"span_id": span.id}, status_code=201)


async def _rewards(gateway: Gateway, request: Request) -> Response:
    caller, rollout_id, attempt_id = await own_attempt(gateway, request)
    new = await read_body(gateway, request, NewReward)
    source = "agent" if caller.role == "attempt" else "api"
    reward = Reward(
        name=new.name, value=check_reward(new.name, new.value), source=source, call_id=new.call_id,
        created_at=time.time(),
    )  # fmt: skip
    if new.call_id is not None:
        calls = await asyncio.to_thread(gateway.reader.calls_of, attempt_id)
        if new.call_id not in {call.id for call in calls}:
            raise RequestRefused(
                f"attempt {attempt_id} has no call {new.call_id}",
                status=404,
                kind="not_found",
                field="call_id",
                hint="the id is in the x-leyden-call header of the answer",
            )
    await add_rewards(gateway, caller.role, rollout_id, attempt_id, [reward])
    return Json({"name": reward.name, "value": reward.value, "call_id": reward.call_id}, status_code=201)


async def _trace(gateway: Gateway, request: Request) -> Response:
    trace = await asyncio.to_thread(gateway.reader.trace, request.path_params["rollout_id"])
    body = await asyncio.to_thread(orjson.dumps, trace, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, media_type="application/json")


async def _watch(gateway: Gateway, request: Request) -> Response:
    topic = request.query_params.get("topic")
    if topic not in (queue.TOPIC, ledger.TOPIC, ledger.RUNS_TOPIC, ledger.CONTROL_TOPIC):
        raise RequestRefused(
            f"topic is {topic!r}", status=422, field="topic",
            hint=f"use {queue.TOPIC}, {ledger.TOPIC}, {ledger.RUNS_TOPIC} or {ledger.CONTROL_TOPIC}",
        )  # fmt: skip
    after = int(number(request, "after", -1, low=-1, high=2**53))
    timeout_s = number(request, "timeout_s", 30.0, low=0.0, high=MAX_POLL_S)
    return Json({"topic": topic, "count": await aio.watch(gateway.store, topic, after, timeout_s)})


async def _policies(gateway: Gateway, request: Request) -> Response:
    names = sorted({*gateway.config.policies, *await gateway.router.aliases()})
    serving = await aio.read(gateway.store, ledger.all_serving)
    return Json([{"policy": name, "serving": serving.get(name)} for name in names])


async def _versions(gateway: Gateway, request: Request) -> Response:
    name = request.path_params["name"]
    versions = await aio.read(gateway.store, lambda connection: ledger.policy_versions(connection, name))
    if not versions and name not in await gateway.router.aliases():
        raise NotFound(f"there is no policy {name!r}")
    return Json(versions)


async def _steps(gateway: Gateway, request: Request) -> Response:
    run_id = request.query_params.get("run_id")
    if run_id is None:
        runs = await aio.read(gateway.store, ledger.runs)
        if not runs:
            return Json([])
        run_id = runs[-1].run_id
    steps = await aio.read(gateway.store, lambda connection: ledger.steps(connection, run_id))
    return Json(steps)


async def _models(gateway: Gateway, request: Request) -> Response:
    caller = await gateway.keys.caller(key_of(request))
    params = request.path_params
    address = Address(
        path=request.url.path, dialect=DIALECTS[0], rollout_id=params.get("rollout_id"),
        attempt_id=params.get("attempt_id"), mode=params.get("mode"),
    )  # fmt: skip
    await attempt_of(gateway.keys, caller, address)
    names = sorted({*await gateway.router.aliases(), *gateway.router.matchers.models})
    listed = [{"id": alias, "object": "model", "created": 0, "owned_by": "leyden"} for alias in names]
    return Json({"object": "list", "data": listed})


async def _unknown(gateway: Gateway, request: Request) -> Response:
    """A path that nothing answers; noted for the attempt whose key it came with, since its base URL is likely
    wrong."""
    path = request.url.path
    caller = await gateway.keys.caller(key_of(request))
    hint = None
    if request.method == "POST" and any(path.rstrip("/").endswith(dialect.path) for dialect in DIALECTS):
        hint = (
            "the base URL must end in /v1, once: use OPENAI_BASE_URL of the attempt's environment as it is; an "
            "Anthropic client adds /v1 itself: use ANTHROPIC_BASE_URL"
        )
    elif request.method == "POST" and path.rstrip("/").endswith("/embeddings"):
        hint = "embeddings are not served: no policy is behind them"
    refusal = RequestRefused(f"nothing answers {request.method} {path}", status=404, kind="not_found", hint=hint)
    note_refusal(gateway.recorder, caller.known, path, refusal)
    return error_response(refusal)
