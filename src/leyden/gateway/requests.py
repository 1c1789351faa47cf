"""Reading a request before it is sent: its body, what it needs of an engine, and what it refers to."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from leyden.base.config import PolicyConfig
from leyden.base.errors import RequestRefused
from leyden.base.records import Choice
from leyden.gateway.auth import KnownAttempt
from leyden.gateway.dialects.base import BUDGET, Body, Dialect, Earlier, ModelRequest, budget_binds
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


def check_needs(request: ModelRequest, policy: PolicyConfig | None, used: Mapping[str, Any], name: str = "") -> None:
    """RequestRefused naming the field that needs what the engine of this policy is not known to have.

    `used` are the sampling parameters: a budget of thinking that they keep to by themselves needs nothing. `name` is
    the policy's, where it is not the one that was asked for.
    """
    name = name or request.alias
    features = policy.engine_features if policy is not None else ()
    for feature, field in request.needs.items():
        if feature == "thinking_budget" and (_has_provider(policy) or not budget_binds(request, used)):
            continue  # a provider keeps to it itself, or refuses thinking by name
        if feature == "thinking_budget" and policy is not None and policy.engine_kind == "sglang":
            raise RequestRefused(
                f"{field} is below max_tokens, and SGLang takes no budget with a request", field=field,
                hint="send max_tokens that are no more than the budget, or thinking of type adaptive",
            )  # fmt: skip
        if feature not in features:
            raise RequestRefused(
                f"{field} needs an engine with {feature!r}, which that of {name!r} is not known to have",
                field=field,
                hint=f"leave {field} out, or list {feature!r} in policies.{name}.engine_features if "
                "its engine can do it" + _OTHERWISE.get(feature, " (the embedded one cannot)"),
            )


_OTHERWISE = {
    "reasoning": " (the embedded one thinks if the chat template has a switch for it, and knows no effort)",
    "thinking_budget": "; or send max_tokens that are no more than the budget",
}
"""The end of the hint, where it is another one."""


def refusal_of(request: ModelRequest, used: Mapping[str, Any], choices: Sequence[Choice]) -> str | None:
    """Why a call must not be trained on although its tokens agree: an image that the learner does not read, or a
    budget of thinking that was reached, since the engine then wrote the end of thinking itself."""
    if "images" in request.needs:
        return "images"
    if "thinking_budget" in request.needs and budget_binds(request, used):
        budget: int = request.engine[BUDGET]
        if any(len(choice.completion_ids) >= budget for choice in choices):
            return "thinking_budget"
    return None


def _has_provider(policy: PolicyConfig | None) -> bool:
    return policy is not None and bool(policy.provider)


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
