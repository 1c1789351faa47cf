"""Pause, resume, drain and their state: how a learner changes weights without losing a call."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from leyden.gateway.rest import Json, read_body
from leyden.gateway.road import Gateway


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Pause(_Body):
    """A pause."""

    retry_after_seconds: float = Field(5, ge=0)
    reason: str | None = None


class Drain(_Body):
    """A drain."""

    timeout_s: float | None = Field(None, gt=0)


async def pause(gateway: Gateway, request: Request) -> Response:
    """Hold new calls back."""
    asked = await read_body(gateway, request, Pause)
    gateway.hold.pause(asked.reason or "", asked.retry_after_seconds)
    return await state(gateway, request)


async def resume(gateway: Gateway, request: Request) -> Response:
    """Let held calls go on."""
    gateway.upstream.forget()
    gateway.hold.resume()
    return await state(gateway, request)


async def drain(gateway: Gateway, request: Request) -> Response:
    """Pause if that was not done, wait for calls in flight, and stop those that are late."""
    asked = await read_body(gateway, request, Drain)
    if not gateway.hold.paused:
        gateway.hold.pause("drain")
    aborted = 0
    if not await gateway.hold.drained(asked.timeout_s or gateway.config.gateway.drain_timeout_s):
        stragglers = [flight for flight in gateway.flights if flight.entered]
        aborted = len(stragglers)
        for flight in stragglers:
            flight.abort("it was still running when the gateway was drained")
        await gateway.hold.drained(gateway.config.gateway.drain_timeout_s)
    return Json({**_state_json(gateway), "drained": gateway.hold.inflight == 0, "aborted": aborted})


async def state(gateway: Gateway, request: Request) -> Response:
    """Whether calls are held, and how many are in flight."""
    return Json(_state_json(gateway))


def _state_json(gateway: Gateway) -> dict[str, Any]:
    hold = gateway.hold
    return {
        "paused": hold.paused, "retry_after_seconds": hold.retry_after_s, "reason": hold.reason or None,
        "inflight": hold.inflight, "waiting": hold.waiting,
    }  # fmt: skip
