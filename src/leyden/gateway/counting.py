"""`v1/messages/count_tokens`: how many tokens a Messages request would be, asked of the engine that would read it.

Engines tell at `/tokenize`, as vLLM's server does. Nothing is sampled, so nothing is recorded.
"""

import asyncio
import time

import aiohttp
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from leyden.base.errors import EngineError, LeydenError, RequestRefused
from leyden.gateway import upstream
from leyden.gateway.address import Address
from leyden.gateway.callers import attempt_of
from leyden.gateway.dialects import BY_NAME
from leyden.gateway.dialects.anthropic import conversation_fields
from leyden.gateway.dialects.anthropic_blocks import with_exact
from leyden.gateway.dialects.base import BUDGET, ModelRequest, refuse_unknown
from leyden.gateway.dialects.openai_wire import parse_alias
from leyden.gateway.engine_answers import error_of
from leyden.gateway.refusals import as_refusal
from leyden.gateway.requests import check_needs, json_object
from leyden.gateway.rest import Json, key_of, read_raw
from leyden.gateway.road import Gateway
from leyden.gateway.stream import read_json

TIMEOUT_S = 30.0
"""Counting is rendering and encoding, which takes milliseconds; an engine that is busy may take a few seconds."""
_DIALECT = BY_NAME["anthropic"]
_FIELDS = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control", "speed"}
)


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The route, under the three addresses of a model call."""

    async def run(request: Request) -> Response:
        try:
            return await _count(gateway, request)
        except LeydenError as error:
            refusal = as_refusal(error)
            body = _DIALECT.error_body(str(refusal), refusal.kind, refusal.field, refusal.hint)
            return Json(body, status_code=refusal.status)

    attempt = "/proxy/rollout/{rollout_id}/attempt/{attempt_id}"
    return [
        Route(f"{prefix}{family}/v1/messages/count_tokens", run, methods=["POST"])
        for prefix in ("", attempt, attempt + "/mode/{mode}")
        for family in ("", "/anthropic")
    ]


async def _count(gateway: Gateway, request: Request) -> Response:
    caller = await gateway.keys.caller(key_of(request))
    params = request.path_params
    address = Address(
        path=request.url.path, dialect=_DIALECT, rollout_id=params.get("rollout_id"),
        attempt_id=params.get("attempt_id"), mode=params.get("mode"),
    )  # fmt: skip
    known = await attempt_of(gateway.keys, caller, address)
    if known is not None:
        gateway.keys.still_runs(known)
    body = json_object(await read_raw(gateway, request))
    refuse_unknown(body, _FIELDS, "count_tokens")
    needs: dict[str, str] = {}
    engine, _ = conversation_fields(body, needs)
    engine.pop(BUDGET, None)  # nothing is sampled, so there is nothing to bound
    needs.pop("thinking_budget", None)
    alias = parse_alias(body)
    asked = ModelRequest(dialect=_DIALECT.name, body=body, alias=alias, asked={}, needs=needs)
    name = gateway.router.matchers.policy_of(alias, lambda: engine)
    check_needs(asked, await gateway.router.policy(name), {}, name)
    if known is not None:
        engine["messages"] = with_exact(engine["messages"], await known.book.recall(gateway.reader))
    route = await gateway.router.route(name, known.rollout if known is not None else None)
    if route.provider is not None:
        raise RequestRefused(
            f"{alias!r} is answered by provider {route.provider.name!r}, which is not asked to count tokens",
            status=501, kind="engine_incapable", hint="count with the provider's own API",
        )  # fmt: skip
    model = await gateway.upstream.name(route)
    sent = {"add_generation_prompt": True, **engine, "model": model}
    try:
        async with asyncio.timeout(TIMEOUT_S):
            response = await gateway.upstream.post(route, "/tokenize", sent, deadline=time.monotonic() + TIMEOUT_S)
            answer = read_json(await upstream.read(response, route))
            response.release()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineError(f"engine {route.endpoint} did not count within {TIMEOUT_S:.0f} s: {error}") from error
    return Json({"input_tokens": _number(answer, response.status, route.endpoint)})


def _number(answer: object, status: int, endpoint: str) -> int:
    """The count in an engine's answer. Raises RequestRefused: 501 if it has no way to count, else its own."""
    count = answer.get("count") if isinstance(answer, dict) else None
    if status == 200 and isinstance(count, int) and not isinstance(count, bool):
        return count
    message, kind = error_of(answer, status, endpoint)
    if (400 <= status < 500 and status not in (404, 405)) or kind == "model_not_found":
        raise RequestRefused(message, status=status, kind=kind)
    raise RequestRefused(
        f"engine {endpoint} does not count tokens: /tokenize answered status {status}", status=501,
        kind="engine_incapable", hint="use an engine with /tokenize (vLLM, the embedded one), or count yourself",
    )  # fmt: skip
