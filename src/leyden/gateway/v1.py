"""The compatible REST surface (docs/gateway.md): rollouts, events, models, pause and resume.

Shapes are those of Agent Lightning 1.0, so its job templates and controllers work unchanged. Where its
behaviour is at fault the shape is kept and the behaviour mended: NaN rewards and lists in place of objects
are 422, a repeated PATCH is 200.
"""

import asyncio
import hashlib
import math
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from leyden.base.errors import NotFound, RequestRefused
from leyden.base.records import Call, Reward, Rollout, RolloutState, Span, Task, check_id, check_reward, new_id
from leyden.gateway import control
from leyden.gateway.auth import OWN_ATTEMPTS, external_attempt
from leyden.gateway.egress import check_endpoint
from leyden.gateway.holdout import refuse_holdout
from leyden.gateway.rest import Json, endpoint, number, own_attempt, read_body
from leyden.gateway.road import Gateway
from leyden.store import aio, ledger, queue
from leyden.traces.reader import Reader

MAX_LISTED = 10_000
"""Most rollouts of one answer."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class LocalConfig(_Body):
    """`config.local`"""

    agent_class: str | None = None
    env_map: dict[str, str] = {}


class JobConfig(_Body):
    """`config.k8s`"""

    job_template: str | None = None


class RolloutConfig(_Body):
    """`config`"""

    timeout_seconds: float = Field(3600, gt=0)
    local: LocalConfig | None = None
    k8s: JobConfig | None = None


class NewRollout(_Body):
    """One item of `POST /api/rollouts`."""

    input: dict[str, Any]
    is_train: bool = True
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None
    rollout_id: str | None = None


class StatusPatch(_Body):
    """`status` of a PATCH."""

    model_config = ConfigDict(extra="forbid", strict=False)

    state: RolloutState | None = None
    k8s_job_name: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None


class RolloutPatch(_Body):
    """A PATCH."""

    status: StatusPatch | None = None


class NewEvent(_Body):
    """One event."""

    event_type: str = Field(min_length=1, max_length=256)
    data: dict[str, Any] = {}


class NewModel(_Body):
    """One model server."""

    model: str = Field(pattern=r"^[\x21-\x7e]+$", max_length=256)
    endpoint: str = Field(pattern=r"^https?://\S+$", max_length=512)
    version: int = Field(0, ge=0)


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The routes of this part."""

    def route(path: str, handler: Any, *methods: str, admin: bool | None = True) -> BaseRoute:
        return Route(path, endpoint(gateway, handler, admin=admin), methods=methods)

    one = "/api/rollouts/{rollout_id}"
    return [
        route("/healthz", _health, "GET", admin=False),
        route("/api/rollouts", _create, "POST"),
        route("/api/rollouts", _list, "GET"),
        route("/api/rollouts/terminal", _terminal, "GET"),
        route(one, _get, "GET"),
        route(one, _patch, "PATCH"),
        route(one, _delete, "DELETE"),
        route(one + "/attempt/{attempt_id}/events", _post_event, "POST", admin=False),
        route(one + "/events", _events, "GET"),
        route("/api/models", _register, "POST", admin=None),
        route("/api/models", _registered, "GET"),
        route("/api/models", _clear, "DELETE", admin=None),
        route("/proxy/pause", control.pause, "POST"),
        route("/proxy/resume", control.resume, "POST"),
        route("/proxy/drain", control.drain, "POST"),
        route("/proxy/state", control.state, "GET"),
    ]


def rollout_json(rollout: Rollout) -> dict[str, Any]:
    """A rollout in the compatible shape."""
    config = {"timeout_seconds": 3600, "local": None, "k8s": None, **rollout.config}
    return {
        "rollout_id": rollout.id,
        "input": rollout.task.input,
        "is_train": rollout.mode == "train",
        "config": config,
        "metadata": rollout.metadata,
        "status": {
            "state": rollout.state,
            "k8s_job_name": rollout.job_name,
            "last_attempt_id": shown_id(rollout.id, rollout.last_attempt_id),
            "error_message": rollout.error_message,
            "version": rollout.version,
            "created_at": rollout.created_at,
            "updated_at": rollout.updated_at,
        },
    }


def call_event(call: Call, triplet: bool) -> dict[str, Any]:
    """A call as a `model_request` event."""
    response = _engine_response(call)
    server = {"model": call.policy, "version": call.policy_version}
    if triplet:
        first = call.choices[0] if call.choices else None
        data: dict[str, Any] = {
            "prompt_token_ids": call.prompt_ids.tolist(),
            "response_token_ids": first.completion_ids.tolist() if first else [],
            "response_log_probs": _finite(first.logprobs.tolist()) if first else None,
            "server": server,
            "http_status": call.http_status,
            "status": "ok" if call.status == "ok" else "error",
        }
    else:
        data = {
            "model": call.policy,
            "model_version": call.policy_version,
            "request": call.request,
            "response": response,
            "server": server,
            "latency_ms": call.latency_ms,
            "http_status": call.http_status,
            "status": "ok" if call.status == "ok" else "error",
            "retry_count": call.retry_count,
            "usage": response.get("usage"),
            "finish_reason": call.choices[0].finish_reason if call.choices else None,
        }
    return {
        "event_type": "model_request", "rollout_id": call.rollout_id,
        "attempt_id": shown_id(call.rollout_id or "", call.attempt_id),
        "timestamp": call.started_at, "data": data,
    }  # fmt: skip


def _engine_response(call: Call) -> dict[str, Any]:
    """The response with the token ids that the harness did not ask for but a trainer does."""
    response = dict(call.response or {})
    by_index = {choice.index: choice for choice in call.choices}
    choices = []
    for choice in response.get("choices") or ():
        sampled = by_index.get(choice.get("index", 0))
        choice = dict(choice)
        if sampled is not None:
            choice["token_ids"] = sampled.completion_ids.tolist()
            logprobs = _finite(sampled.logprobs.tolist())
            if logprobs is not None and choice.get("logprobs") is None:
                choice["logprobs"] = {"content": [{"logprob": value} for value in logprobs]}
        choices.append(choice)
    if choices:
        response |= {"choices": choices, "prompt_token_ids": call.prompt_ids.tolist()}
    return response


def _finite(values: list[float]) -> list[float] | None:
    return values if all(map(math.isfinite, values)) else None


async def _health(gateway: Gateway, request: Request) -> Response:
    return Json({"status": "ok"})


async def _create(gateway: Gateway, request: Request) -> Response:
    new = [_rollout_of(item) for item in await read_body(gateway, request, list[NewRollout])]
    await asyncio.to_thread(refuse_holdout, gateway.guard, new)
    made = await aio.write(gateway.store, lambda connection: queue.enqueue(connection, gateway.store, new))
    return Json([rollout_json(rollout) for rollout in made], status_code=201)


def _rollout_of(item: NewRollout) -> Rollout:
    rollout_id = check_id(item.rollout_id, "rollout_id") if item.rollout_id is not None else new_id("ro")
    data_id = item.input.get("data_id") or item.input.get("instance_id") or ""
    config = (item.config or RolloutConfig()).model_dump()
    return Rollout(
        id=rollout_id,
        task=Task(id=str(data_id) or rollout_id, split="train" if item.is_train else "val", input=item.input),
        mode="train" if item.is_train else "val",
        seed=int.from_bytes(hashlib.blake2b(rollout_id.encode(), digest_size=4).digest(), "big"),
        metadata=item.metadata or {},
        config=config,
    )


async def _list(gateway: Gateway, request: Request) -> Response:
    names = request.query_params.getlist("state_in")
    if not names:
        raise RequestRefused(
            "state_in is missing", status=422, field="state_in", hint="?state_in=queuing&state_in=running"
        )
    try:
        states = [RolloutState(name) for name in names]
    except ValueError:
        known = ", ".join(RolloutState)
        raise RequestRefused(f"state_in is {names}; known: {known}", status=422, field="state_in") from None
    limit = int(number(request, "limit", 500, low=1, high=MAX_LISTED))
    found = await aio.read(gateway.store, lambda connection: queue.select_by_state(connection, states, limit))
    return Json([rollout_json(rollout) for rollout in found])


async def _terminal(gateway: Gateway, request: Request) -> Response:
    after = int(number(request, "after", 0, low=0, high=2**53))
    limit = int(number(request, "limit", 1000, low=1, high=MAX_LISTED))
    found, next_after, total = await aio.read(
        gateway.store, lambda connection: queue.terminal(connection, after, limit)
    )
    items = [
        {
            "rollout_id": rollout.id, "state": rollout.state, "data_id": rollout.task.id,
            "is_train": rollout.mode == "train",
        }
        for rollout in found
    ]  # fmt: skip
    return Json({"items": items, "next_after": next_after, "total_terminal": total})


async def _get(gateway: Gateway, request: Request) -> Response:
    rollout_id = request.path_params["rollout_id"]
    rollout, attempts = await aio.read(
        gateway.store, lambda c: (queue.get(c, rollout_id), queue.attempts(c, rollout_id))
    )
    return Json({"rollout": rollout_json(rollout), "attempts": [shown_id(rollout_id, a.id) for a in attempts]})


async def _patch(gateway: Gateway, request: Request) -> Response:
    patch = (await read_body(gateway, request, RolloutPatch)).status or StatusPatch()
    rollout_id = request.path_params["rollout_id"]
    rollout = await aio.write(
        gateway.store,
        lambda connection: queue.patch_status(
            connection,
            gateway.store,
            rollout_id,
            state=patch.state,
            job_name=patch.k8s_job_name,
            last_attempt_id=_stored_id(rollout_id, patch.last_attempt_id),
            error_message=patch.error_message,
            now=time.time(),
        ),
    )
    return Json(rollout_json(rollout))


def _stored_id(rollout_id: str, attempt_id: str | None) -> str | None:
    """An attempt id as it is stored: controllers name their attempts per rollout (`0`), the store over all of
    them."""
    if attempt_id is None or attempt_id.startswith((OWN_ATTEMPTS, f"{rollout_id}.")):
        return attempt_id
    return external_attempt(rollout_id, check_id(attempt_id, "last_attempt_id"))


def shown_id(rollout_id: str, attempt_id: str | None) -> str | None:
    """An attempt id as its controller knows it."""
    return attempt_id.removeprefix(f"{rollout_id}.") if attempt_id is not None else None


async def _delete(gateway: Gateway, request: Request) -> Response:
    rollout_id = request.path_params["rollout_id"]
    await aio.write(gateway.store, lambda connection: queue.delete(connection, gateway.store, rollout_id))
    return Response(status_code=204)


async def _post_event(gateway: Gateway, request: Request) -> Response:
    caller, rollout_id, attempt_id = await own_attempt(gateway, request)
    event = await read_body(gateway, request, NewEvent)
    now = time.time()
    if event.event_type == "reward":
        await add_rewards(gateway, caller.role, rollout_id, attempt_id, [Reward(
            name="reward", value=check_reward("reward", event.data.get("value")),
            source="agent" if caller.role == "attempt" else "api", created_at=now,
        )])  # fmt: skip
    elif event.event_type == "model_request":
        raise RequestRefused(
            "model_request events are made by the gateway alone", status=422, field="event_type",
            hint="call the model through the gateway",
        )  # fmt: skip
    span = Span(
        id=new_id("span"), rollout_id=rollout_id, attempt_id=attempt_id, name=event.event_type, kind="event",
        attributes=event.data, started_at=now, ended_at=now,
    )  # fmt: skip
    await asyncio.wrap_future(gateway.recorder.span(span))
    return Json({
        "event_type": event.event_type, "rollout_id": rollout_id,
        "attempt_id": shown_id(rollout_id, attempt_id), "timestamp": now,
        "data": event.data,
    })  # fmt: skip


async def add_rewards(gateway: Gateway, role: str, rollout_id: str, attempt_id: str, rewards: list[Reward]) -> None:
    """Record rewards. Raises RequestRefused (403) where an attempt may not reward itself."""
    if role == "attempt" and not gateway.config.rewards.from_agent:
        raise RequestRefused(
            "an attempt may not reward itself here", status=403, kind="permission_error",
            hint="set rewards.from_agent = true, or let a verifier give the reward",
        )  # fmt: skip
    await asyncio.wrap_future(gateway.recorder.rewards(rollout_id, attempt_id, rewards))


async def _events(gateway: Gateway, request: Request) -> Response:
    rollout_id, kind = request.path_params["rollout_id"], request.query_params.get("event_type")
    triplet = request.query_params.get("format") == "triplet"
    events = await asyncio.to_thread(_collect_events, gateway.reader, gateway, rollout_id, triplet)
    return Json([event for event in events if kind is None or event["event_type"] == kind])


def _collect_events(reader: Reader, gateway: Gateway, rollout_id: str, triplet: bool) -> list[dict[str, Any]]:
    try:
        trace = reader.trace(rollout_id)
    except NotFound:
        gateway.store.read(lambda connection: queue.get(connection, rollout_id))  # NotFound again if it is unknown
        return []
    events = [call_event(call, triplet) for call in trace.calls if call.status != "open"]
    events += [
        {
            "event_type": span.name, "rollout_id": rollout_id,
            "attempt_id": shown_id(rollout_id, span.attempt_id),
            "timestamp": span.started_at, "data": span.attributes,
        }
        for span in trace.spans
        if span.kind == "event"
    ]  # fmt: skip
    return sorted(events, key=lambda event: event["timestamp"])


async def _register(gateway: Gateway, request: Request) -> Response:
    models = await read_body(gateway, request, list[NewModel])
    for model in models:
        await check_endpoint(model.endpoint, gateway.config.gateway.engine_hosts)

    def job(connection: Any) -> None:
        for model in models:
            ledger.upsert_engine(connection, gateway.store, model.model, model.endpoint, model.version)

    await aio.write(gateway.store, job)
    gateway.upstream.forget()
    return Json([model.model_dump() for model in models], status_code=201)


async def _registered(gateway: Gateway, request: Request) -> Response:
    rows = await aio.read(gateway.store, ledger.engines)
    return Json([{"model": row.model, "endpoint": row.endpoint, "version": row.version} for row in rows])


async def _clear(gateway: Gateway, request: Request) -> Response:
    await aio.write(gateway.store, lambda connection: ledger.clear_engines(connection, gateway.store))
    return Json({"status": "ok"})
