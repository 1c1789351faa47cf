"""What every REST route shares: keys, bodies and errors. The routes are in `v1` (compatible) and `records`
(ours)."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from leyden.base.errors import Conflict, HoldoutError, LeydenError, NotFound, RecordError, RequestRefused
from leyden.gateway.auth import Caller
from leyden.gateway.refusals import as_refusal
from leyden.gateway.road import Gateway

T = TypeVar("T")
Handler = Callable[[Gateway, Request], Awaitable[Response]]


class Json(Response):
    """A JSON response by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Bytes of `content`."""
        return orjson.dumps(content)


def endpoint(
    gateway: Gateway, handler: Handler, *, admin: bool | None = True
) -> Callable[[Request], Awaitable[Response]]:
    """A Starlette endpoint. `admin` True takes the administrator's and the runner's key, None the administrator's
    only; with False the handler checks itself."""

    async def run(request: Request) -> Response:
        try:
            if admin is None:
                await require_admin(gateway, request)
            elif admin:
                await require(gateway, request)
            return await handler(gateway, request)
        except LeydenError as error:
            gateway.metrics.refused(as_refusal(error).kind)
            return error_response(error)

    return run


def error_response(error: LeydenError) -> Response:
    """An error as JSON."""
    status = {NotFound: 404, Conflict: 409, RecordError: 422, HoldoutError: 422}.get(type(error))
    refusal = as_refusal(error) if status is None else RequestRefused(str(error), status=status, kind=_kind(error))
    body: dict[str, Any] = {"type": refusal.kind, "message": str(refusal)}
    if refusal.field is not None:
        body["field"] = refusal.field
    if refusal.hint is not None:
        body["hint"] = refusal.hint
    return Json({"error": body}, status_code=refusal.status)


def key_of(request: Request) -> bytes | None:
    """The key that a request was sent with."""
    return key_in(request.scope["headers"])


def key_in(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    """The key in ASGI headers: a bearer token, or `x-api-key`."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"x-api-key":
            return value.strip()
    return None


async def require(gateway: Gateway, request: Request) -> Caller:
    """The administrator or the runner. Raises RequestRefused: 401, 403."""
    caller = await gateway.keys.caller(key_of(request))
    if caller.role in ("attempt", "service"):
        may = "call models" if caller.role == "service" else "call models and add spans of its own attempt"
        raise RequestRefused(
            f"this key can {may}, nothing else", status=403, kind="permission_error",
            hint="use the administrator's key",
        )  # fmt: skip
    return caller


async def require_admin(gateway: Gateway, request: Request) -> None:
    """The administrator. Raises RequestRefused: 401, 403."""
    if (await require(gateway, request)).role != "admin":
        raise RequestRefused(
            "only the administrator's key can do this", status=403, kind="permission_error",
            hint="use the administrator's key",
        )  # fmt: skip


async def own_attempt(gateway: Gateway, request: Request) -> tuple[Caller, str, str]:
    """(caller, rollout id, attempt id) of a path, for the administrator or the attempt itself. 401, 403, 404,
    409."""
    rollout_id, attempt_id = request.path_params["rollout_id"], request.path_params["attempt_id"]
    caller = await gateway.keys.caller(key_of(request))
    if caller.role == "service":
        await require(gateway, request)
    if caller.known is None:
        known = await gateway.keys.attempt(rollout_id, attempt_id)
        return caller, known.rollout.id, known.attempt.id
    if (caller.known.rollout.id, caller.known.attempt.id) != (rollout_id, attempt_id):
        raise RequestRefused(
            f"this key belongs to another attempt than {attempt_id} of rollout {rollout_id}", status=403,
            kind="permission_error", hint="use the URL and the key of the same environment",
        )  # fmt: skip
    gateway.keys.still_runs(caller.known)
    return caller, rollout_id, attempt_id


async def read_raw(gateway: Gateway, request: Request) -> bytes:
    """The body. Raises RequestRefused (413)."""
    limit = gateway.config.gateway.max_body_bytes
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise RequestRefused(
                f"the request has more than {limit} bytes", status=413, kind="request_too_large",
                hint="shorten it, or raise gateway.max_body_bytes",
            )  # fmt: skip
        parts.append(part)
    return b"".join(parts)


async def read_body(gateway: Gateway, request: Request, model: type[T]) -> T:
    """The body as `model` (a pydantic model or a list of them). Raises RequestRefused: 413, 400, 422."""
    raw = await read_raw(gateway, request)
    try:
        value = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise RequestRefused(
            f"the body is not JSON: {error}", status=422, hint="NaN and Infinity are no JSON"
        ) from None
    try:
        return TypeAdapter(model).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or None
        what = f"{field}: " if field else ""
        raise RequestRefused(f"{what}{first['msg']}", status=422, field=field) from None


def number(request: Request, name: str, default: float, *, low: float, high: float) -> float:
    """A number of the query string. Raises RequestRefused (422)."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise RequestRefused(f"{name} is {text!r}; it must be from {low:g} to {high:g}", status=422, field=name)
    return value


def _kind(error: LeydenError) -> str:
    return {"NotFound": "not_found", "Conflict": "conflict"}.get(type(error).__name__, "invalid_request_error")


__all__ = [
    "BaseModel",
    "Json",
    "endpoint",
    "error_response",
    "key_in",
    "key_of",
    "number",
    "own_attempt",
    "read_body",
    "read_raw",
    "require",
    "require_admin",
]
