"""Reading a request before it is sent: its body, what it needs of an engine, and what it refers to."""

import asyncio

import orjson

from leyden.base.config import PolicyConfig
from leyden.base.errors import RequestRefused
from leyden.gateway.auth import KnownAttempt
from leyden.gateway.dialects.base import Body, Dialect, Earlier, ModelRequest
from leyden.traces.reader import Reader


def json_object(raw: bytes) -> Body:
    """The body of a request. Raises RequestRefused: 400 for what is no JSON, 422 for what is no object."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the body is not JSON: {error}", hint="send a JSON object") from None
    if not isinstance(body, dict):
        raise RequestRefused(
            f"the body is a JSON {_json_name(body)}; it must be an object",
            status=422,
            hint="send a JSON object",
        )
    return body


def check_needs(request: ModelRequest, policy: PolicyConfig | None) -> None:
    """RequestRefused naming the field that needs what the engine of this policy is not known to have."""
    features = policy.engine_features if policy is not None else ()
    for feature, field in request.needs.items():
        if feature not in features:
            raise RequestRefused(
                f"{field} needs an engine with {feature!r}, which that of {request.alias!r} is not known to have",
                field=field,
                hint=f"leave {field} out, or list {feature!r} in policies.{request.alias}.engine_features if "
                "its engine can do it (the embedded one cannot)",
            )


async def resolved(reader: Reader, known: KnownAttempt | None, dialect: Dialect, request: ModelRequest) -> ModelRequest:
    """The request with the earlier answers of its attempt that it refers to. Raises RequestRefused."""
    if known is None:
        if request.previous is None:
            return request  # live traffic is not trained on, so a text that reads the same will do
        raise RequestRefused(
            "an answer can be continued within an attempt of a rollout only", field="previous_response_id",
            hint="send the whole conversation as input",
        )  # fmt: skip
    if request.previous is not None:
        calls = await asyncio.to_thread(reader.calls_of, known.attempt.id)
        return dialect.resolve(request, Earlier(calls=calls))
    return dialect.resolve(request, Earlier(texts=await known.book.recall(reader)))


def _json_name(value: object) -> str:
    return {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}.get(type(value), "null")
