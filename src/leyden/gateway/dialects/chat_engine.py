"""The engine's side of every dialect that is answered by chat: probe, capture of tokens, assembly of streams.

The engine speaks Chat Completions as vLLM's server does. What a harness speaks is the business of the dialects.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from leyden.base.errors import RequestRefused
from leyden.gateway.dialects.base import Body, Capture, Earlier, ModelRequest, take
from leyden.gateway.dialects.openai_wire import ChoiceAssembly, merge_delta
from leyden.traces.tokens import RawChoice

TOP_FIELDS = ("id", "object", "created", "model", "system_fingerprint", "service_tier")
"""Fields of an answer beside its choices."""
REASONING_FIELDS = ("reasoning_content", "reasoning")
"""Names under which engines give reasoning apart from content; the first is the older and commoner one."""
VALUES = "leyden_values"
"""Field of log-probabilities that were read as numbers only."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Amounts of reasoning that a harness can name."""


class ChatEngine:
    """The part of `base.Dialect` that looks towards the engine."""

    engine_path = "chat/completions"

    def engine_body(self, request: ModelRequest, used: Mapping[str, Any], model: str) -> Body:
        """The body for the engine, with `used` sampling parameters."""
        body: Body = {**request.engine, **used}
        body.update(model=model, logprobs=True, return_token_ids=True)
        if request.stream:
            body.update(stream=True, stream_options={"include_usage": True})
        return body

    def probe_body(self, model: str) -> Body:
        """The smallest request whose answer shows what an engine can return."""
        return {
            "model": model,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": True,
            "return_token_ids": True,
        }

    def capture(self, answer: Body) -> Capture:
        """Tokens of an engine's unstreamed answer."""
        choices = []
        for choice in answer.get("choices") or ():
            message = choice.get("message") or {}
            choices.append(
                RawChoice(
                    index=choice.get("index", 0),
                    completion_ids=choice.get("token_ids"),
                    logprobs=_logprobs(choice.get("logprobs")),
                    finish_reason=choice.get("finish_reason") or "",
                    text=message.get("content") or "",
                )
            )
        return Capture(
            prompt_ids=answer.get("prompt_token_ids"),
            choices=choices,
            usage=answer.get("usage") or {},
            is_spliced=answer.get("leyden_prompt") == "spliced",
        )

    def assembly(self, request: ModelRequest) -> "ChatAssembly":
        """An empty copy for a stream."""
        return ChatAssembly(request.num_choices)

    def resolve(self, request: ModelRequest, earlier: Earlier) -> ModelRequest:
        """The request as it is, where a dialect refers to nothing."""
        return request


class ChatAssembly(ChoiceAssembly):
    """See `base.Assembly`."""

    TOP_FIELDS = TOP_FIELDS

    def body(self) -> Body:
        """The engine's answer as it would have been without streaming, as far as it has come."""
        body = super().body()
        for choice in body["choices"]:
            message = choice["message"]
            if message.get("tool_calls") and message.get("content") == "":
                message["content"] = None  # an unstreamed answer that only calls tools has null content
        body["object"] = "chat.completion"
        return body

    def _fresh(self) -> Body:
        return {"message": {"role": "assistant", "content": None}}

    def _merge(self, choice: Body, piece: Body) -> None:
        merge_delta(choice["message"], piece.get("delta") or {})
        content = (piece.get("logprobs") or {}).get("content")
        if content is not None:
            choice["logprobs"] = choice["logprobs"] or {"content": []}
            choice["logprobs"]["content"].extend(content)


def _logprobs(given: Any) -> list[float] | None:
    """The log-probability of each token. Entries of a wrong shape become NaN, which is refused by name."""
    given = given or {}
    values: list[float] | None = given.get(VALUES)
    if values is not None:
        return values
    content = given.get("content")
    if content is None:
        return None
    try:
        return [entry["logprob"] for entry in content]
    except (KeyError, TypeError):
        return [math.nan] * len(content)


def reasoning_of(message: Mapping[str, Any]) -> tuple[str, str]:
    """(field, text) of the reasoning in a message or delta; the text is empty if there is none."""
    for name in REASONING_FIELDS:
        text = message.get(name)
        if text:
            return name, text
    return REASONING_FIELDS[0], ""


def first_message(answer: Mapping[str, Any]) -> tuple[Body, str, Any]:
    """(message, finish reason, stop reason) of an answer of one choice, as far as it has come."""
    choices = answer.get("choices") or [{}]
    choice = choices[0]
    return choice.get("message") or {}, choice.get("finish_reason") or "", choice.get("stop_reason")


def check_tool_choice(choice: Any, names: Sequence[str], field: str = "tool_choice") -> None:
    """A choice in the engine's form against the tools on offer. Raises RequestRefused."""
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise RequestRefused(f"{field} was sent without tools", field=field, hint=f"send tools, or leave {field} out")
    if choice == "required":
        return
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(name, str):
        raise RequestRefused(
            f"{field} is {choice!r}, which is not supported", field=field,
            hint='send "auto", "none", "required", or the name of one function',
        )  # fmt: skip
    if name not in names:
        raise RequestRefused(
            f"{field} names {name!r}, which is not among the tools", field=field,
            hint=f"known: {', '.join(names)}",
        )  # fmt: skip


def check_format(given: Any, field: str) -> Body | None:
    """`response_format` for the engine, None where it changes nothing. Raises RequestRefused."""
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind == "json_schema":
        schema = given.get("json_schema")
        if isinstance(schema, dict) and isinstance(schema.get("schema"), dict) and schema.get("name"):
            return {"type": "json_schema", "json_schema": schema}
        raise RequestRefused(
            f"{field} has no schema with a name", field=field,
            hint='send {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
        )  # fmt: skip
    raise RequestRefused(
        f"{field} of type {kind!r} is not supported", field=field, hint='use "text", "json_object" or "json_schema"'
    )


def check_effort(body: Mapping[str, Any], key: str, field: str) -> str | None:
    """The amount of reasoning asked for. Raises RequestRefused."""
    effort: str | None = take({field: body.get(key)}, field, lambda v: v in EFFORTS, f"one of {', '.join(EFFORTS)}")
    return effort


def image_part(url: Any, field: str, detail: Any = None) -> Body:
    """An image for the engine. Raises RequestRefused."""
    if not isinstance(url, str) or not url:
        raise RequestRefused(f"{field} has no URL of an image", field=field, hint="send an http or data URL")
    image: Body = {"url": url}
    if detail is not None:
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def joined(parts: Sequence[Body]) -> str | list[Body] | None:
    """Content in its one form for the engine: a text where that is all, else the list of parts."""
    if not parts:
        return None
    if len(parts) == 1 and parts[0]["type"] == "text":
        return str(parts[0]["text"])
    return list(parts)
