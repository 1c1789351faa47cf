"""Pause, resume, drain and their state: how a learner changes weights without losing a call.

Where several workers serve, each order is carried out by all of them before it is answered; their numbers are added.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from leyden.gateway import metrics
from leyden.gateway.rest import Json, read_body
from leyden.gateway.road import Gateway
from leyden.gateway.siblings import Carry, hold_key
from leyden.store import aio, ledger


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
    held = {"paused": True, "reason": asked.reason or "", "retry_after_s": asked.retry_after_seconds}
    return Json(await _all(gateway, "pause", held, held=held))


async def resume(gateway: Gateway, request: Request) -> Response:
    """Let held calls go on."""
    return Json(await _all(gateway, "resume", {}, held={"paused": False}))


async def drain(gateway: Gateway, request: Request) -> Response:
    """Pause if that was not done, wait for calls in flight, and stop those that are late."""
    asked = await read_body(gateway, request, Drain)
    timeout_s = asked.timeout_s or gateway.config.gateway.drain_timeout_s
    held = None
    if gateway.siblings is not None and not gateway.hold.paused:
        held = {"paused": True, "reason": "drain", "retry_after_s": 0.0}
    patience_s = timeout_s + gateway.config.gateway.drain_timeout_s
    return Json(await _all(gateway, "drain", {"timeout_s": timeout_s}, held=held, patience_s=patience_s))


async def state(gateway: Gateway, request: Request) -> Response:
    """Whether calls are held, and how many are in flight."""
    return Json(await _all(gateway, "state", {}))


async def _pause(gateway: Gateway, order: dict[str, Any]) -> dict[str, Any]:
    gateway.hold.pause(order["reason"], order["retry_after_s"])
    return _state_json(gateway)


async def _resume(gateway: Gateway, order: dict[str, Any]) -> dict[str, Any]:
    gateway.upstream.forget()
    gateway.hold.resume()
    return _state_json(gateway)


async def _drain(gateway: Gateway, order: dict[str, Any]) -> dict[str, Any]:
    if not gateway.hold.paused:
        gateway.hold.pause("drain")
    aborted = 0
    if not await gateway.hold.drained(order["timeout_s"]):
        stragglers = [flight for flight in gateway.flights if flight.entered]
        aborted = len(stragglers)
        for flight in stragglers:
            flight.abort("it was still running when the gateway was drained")
        await gateway.hold.drained(gateway.config.gateway.drain_timeout_s)
    return {**_state_json(gateway), "drained": gateway.hold.inflight == 0, "aborted": aborted}


async def _state(gateway: Gateway, order: dict[str, Any]) -> dict[str, Any]:
    return _state_json(gateway)


async def _page(gateway: Gateway, order: dict[str, Any]) -> dict[str, Any]:
    return {"page": metrics.page(gateway).decode()}


CARRY: dict[str, Carry] = {
    "pause": _pause, "resume": _resume, "drain": _drain, "state": _state, "metrics": _page
}  # fmt: skip
"""What every worker can be ordered to do."""


async def _all(
    gateway: Gateway, verb: str, order: dict[str, Any], *, held: dict[str, Any] | None = None, patience_s: float = 0.0
) -> dict[str, Any]:
    """Carry an order out here, or have every worker do so. `held` is kept for workers that start later."""
    siblings = gateway.siblings
    if siblings is None:
        return await CARRY[verb](gateway, order)
    if held is not None:
        kept = {"reason": "", "retry_after_s": 0.0, **held}
        await aio.write(gateway.store, lambda c: ledger.set_quietly(c, hold_key(siblings), kept))
    replies = list((await siblings.order(verb, order, patience_s)).values())
    merged = dict(replies[0])
    for name in ("inflight", "waiting", "aborted"):
        if name in merged:
            merged[name] = sum(reply[name] for reply in replies)
    merged["paused"] = all(reply["paused"] for reply in replies)
    if "drained" in merged:
        merged["drained"] = all(reply["drained"] for reply in replies)
    return {**merged, "workers": len(replies)}


def _state_json(gateway: Gateway) -> dict[str, Any]:
    hold = gateway.hold
    return {
        "paused": hold.paused, "retry_after_seconds": hold.retry_after_s, "reason": hold.reason or None,
        "inflight": hold.inflight, "waiting": hold.waiting,
    }  # fmt: skip
