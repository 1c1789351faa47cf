"""Anthropic Messages: `v1/messages`, streaming and not, with tools and thinking. The engine answers it as chat.

`cache_control` is taken and ignored: it asks for speed and money, and changes no token.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from leyden.base.errors import RequestRefused
from leyden.gateway.dialects.anthropic_blocks import (
    EXACT,
    SEALED,
    Conversation,
    blocks_of,
    exact_texts,
    plain,
    with_exact,
)
from leyden.gateway.dialects.anthropic_stream import MessageTranslator
from leyden.gateway.dialects.anthropic_thinking import begun, thinking_fields
from leyden.gateway.dialects.base import (
    BUDGET,
    Body,
    Capture,
    Earlier,
    ModelRequest,
    budget_binds,
    is_count,
    is_number,
    only_neutral,
    refuse_unknown,
    take,
)
from leyden.gateway.dialects.chat_engine import (
    REASONING_FIELDS,
    ChatEngine,
    check_effort,
    check_format,
    check_tool_choice,
    first_message,
)
from leyden.gateway.dialects.openai_wire import parse_alias

_TAKEN = {
    "model", "messages", "max_tokens", "system", "tools", "tool_choice", "stop_sequences", "temperature", "top_p",
    "stream", "metadata", "thinking", "output_config", "cache_control",
}  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "service_tier": ("auto",),
    "speed": ("standard",),
}
_FIELDS = frozenset({*_TAKEN, *_NEUTRAL})
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOL_FIELDS = {"type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming"}
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal", "stop": "end_turn"}
_KINDS = {
    "not_found": "not_found_error", "model_not_found": "not_found_error", "hold_timeout": "overloaded_error",
    "aborted": "overloaded_error", "attempt_ended": "invalid_request_error", "rollout_ended": "invalid_request_error",
    "request_too_large": "request_too_large",
}  # fmt: skip
_OWN_KINDS = frozenset(
    {"invalid_request_error", "authentication_error", "permission_error", "not_found_error", "rate_limit_error"}
)


class Anthropic(ChatEngine):
    """See `base.Dialect`."""

    name = "anthropic"
    family = "anthropic"
    path = "messages"
    id_header = b"request-id"

    def parse(self, body: Body) -> ModelRequest:
        """Read a body. Raises RequestRefused that names the field."""
        refuse_unknown(body, _FIELDS, "Messages")
        only_neutral(body, _NEUTRAL)
        asked = _asked(body)
        needs: dict[str, str] = {}
        engine, rewrites = conversation_fields(body, needs)
        engine |= _settings(body, needs)
        take(body, "metadata", lambda v: isinstance(v, dict), "an object")
        stream = take(body, "stream", lambda v: isinstance(v, bool), "true or false", False)
        recalls = any("tool_calls" in message for message in engine["messages"])
        return ModelRequest(
            dialect=self.name, body=body, alias=parse_alias(body), asked=asked, stream=stream, engine=engine,
            needs=needs, recalls=recalls, rewrites=rewrites,
        )  # fmt: skip

    def resolve(self, request: ModelRequest, earlier: Earlier) -> ModelRequest:
        """The request with the engine's own text of arguments that come back."""
        messages = with_exact(request.engine["messages"], earlier.texts)
        return structs.replace(request, engine={**request.engine, "messages": messages})

    def engine_body(self, request: ModelRequest, used: Mapping[str, Any], model: str) -> Body:
        """The body for the engine, with `used` sampling parameters."""
        body = super().engine_body(request, used, model)
        if BUDGET in body and not budget_binds(request, used):
            del body[BUDGET]
        return body

    def capture(self, answer: Body) -> Capture:
        """Tokens of an engine's unstreamed answer, and texts that later requests do not bring back."""
        capture = super().capture(answer)
        return structs.replace(capture, texts=exact_texts(first_message(answer)[0]))

    def public(self, answer: Body, request: ModelRequest, call_id: str) -> Body:
        """What the harness gets of an unstreamed answer."""
        message, reason, stop = first_message(answer)
        public = self._head(answer, request, call_id)
        public["content"] = blocks_of(message)
        public["stop_reason"] = _STOPS.get(reason, "end_turn") if reason else None
        if reason == "stop" and message.get("tool_calls"):
            public["stop_reason"] = "tool_use"  # engines say `stop` where a call was forced
        elif reason == "stop" and isinstance(stop, str):
            public["stop_reason"], public["stop_sequence"] = "stop_sequence", stop
        public["usage"] = _usage(answer)
        exact = exact_texts(message)
        if exact:
            public[EXACT] = {name: [text for _, text in texts] for name, texts in exact.items()}
        return public

    def translator(self, request: ModelRequest, call_id: str) -> MessageTranslator:
        """The way of a new stream."""
        return MessageTranslator(lambda chunk: self._head(chunk, request, call_id), self._failure)

    def replay(self, response: Mapping[str, Any], request: ModelRequest) -> bytes:
        """A stored answer as a whole stream."""
        public = dict(response)
        head = {**public, "content": [], "stop_reason": None, "stop_sequence": None}
        head.pop(EXACT, None)  # a stream has no place for it
        translator = MessageTranslator(lambda chunk: head, self._failure)
        pieces = [_piece(block, index) for index, block in enumerate(public.get("content") or ())]
        return translator.events({"choices": pieces}) + translator.closing(public)

    def error_body(self, message: str, kind: str, field: str | None, hint: str | None) -> Body:
        """An error in the shape of the dialect."""
        own = kind if kind in _OWN_KINDS else _KINDS.get(kind, "api_error")
        error: Body = {"type": own, "message": message, "code": kind}
        if field is not None:
            error["field"] = field
        if hint is not None:
            error["hint"] = hint
        return {"type": "error", "error": error}

    def _failure(self, message: str, kind: str) -> Body:
        return self.error_body(message, kind, None, None)

    def _head(self, answer: Mapping[str, Any], request: ModelRequest, call_id: str) -> Body:
        """A message without what the model said; a stream's first chunk tells the length of the prompt by its
        ids."""
        read = len(answer.get("prompt_token_ids") or ())
        return {
            "id": f"msg_{call_id}", "type": "message", "role": "assistant", "model": request.alias, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": read, "output_tokens": 0},
        }  # fmt: skip


def conversation_fields(body: Body, needs: dict[str, str]) -> tuple[Body, tuple[str, ...]]:
    """(fields for the engine that a prompt is made of; what did not reach it as it was). Raises RequestRefused."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused(
            "messages must be a list with at least one message", field="messages",
            hint='send [{"role": "user", "content": "..."}]',
        )  # fmt: skip
    conversation = Conversation()
    if body.get("system") is not None:
        conversation.system(body["system"])
    for index, message in enumerate(messages):
        conversation.add(message, f"messages[{index}]")
    engine: Body = {"messages": conversation.messages, **thinking_fields(body.get("thinking"), needs)}
    if messages[-1]["role"] == "assistant":
        engine |= begun(conversation.messages[-1], body.get("thinking"), f"messages[{len(messages) - 1}]")
    if conversation.images is not None:
        needs["images"] = conversation.images
    tools = take(body, "tools", lambda v: isinstance(v, list), "a list of tools", [])
    if tools:
        engine["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    return engine, conversation.rewrites


def _settings(body: Body, needs: dict[str, str]) -> Body:
    """Fields for the engine beside messages, tools and sampling. Raises RequestRefused."""
    engine: Body = {}
    names = [tool["name"] for tool in body.get("tools") or ()]
    choice = take(body, "tool_choice", lambda v: isinstance(v, dict), "an object", {})
    if choice:
        kind, alone = choice.get("type"), choice.get("disable_parallel_tool_use")
        wanted: Any = _CHOICES.get(kind) if isinstance(kind, str) else None
        if kind == "tool":
            wanted = {"type": "function", "function": {"name": choice.get("name")}}
        check_tool_choice(wanted if wanted is not None else choice, names)
        engine["tool_choice"] = wanted
        if alone:
            engine["parallel_tool_calls"] = False
    config = take(body, "output_config", lambda v: isinstance(v, dict), "an object", {})
    for key in config:
        if key not in ("effort", "format") and config[key] is not None:
            raise RequestRefused(
                f"output_config.{key} is not supported", field=f"output_config.{key}", hint=f"leave {key} out"
            )
    form = config.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"name": "output", "schema": form.get("schema")}}
    response_format = check_format(form, "output_config.format")
    if response_format is not None:
        needs["response_format"] = "output_config.format"
        engine["response_format"] = response_format
    effort = check_effort(config, "effort", "output_config.effort")
    if effort is not None:
        needs["reasoning"] = "output_config.effort"
        engine["reasoning_effort"] = effort
    return engine


def _asked(body: Body) -> dict[str, Any]:
    if body.get("max_tokens") is None:
        raise RequestRefused(
            "max_tokens is missing", field="max_tokens", hint="send max_tokens, a whole number of at least 1"
        )
    asked = {
        "max_tokens": take(body, "max_tokens", is_count, "a whole number of at least 1"),
        "temperature": take(body, "temperature", lambda v: is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
        "top_p": take(body, "top_p", lambda v: is_number(v) and 0 < v <= 1, "a number above 0 and at most 1"),
        "stop": take(
            body, "stop_sequences", lambda v: isinstance(v, list) and all(isinstance(s, str) and s for s in v),
            "a list of non-empty strings",
        ) or None,
    }  # fmt: skip
    return {key: value for key, value in asked.items() if value is not None}


def _tool(tool: Any, where: str) -> Body:
    kind = tool.get("type") if isinstance(tool, dict) else tool
    if not isinstance(tool, dict) or kind not in (None, "custom"):
        raise RequestRefused(
            f"{where} is of type {kind!r}; only tools of your own can be offered to a model here", field=where,
            hint="send name, description and input_schema",
        )  # fmt: skip
    if not isinstance(tool.get("name"), str) or not tool["name"] or not isinstance(tool.get("input_schema"), dict):
        raise RequestRefused(
            f"{where} needs name and input_schema", field=where, hint="send both, the schema as an object"
        )
    for key, value in tool.items():
        if key not in _TOOL_FIELDS and value not in (None, False, []):
            raise RequestRefused(f"{where}.{key} is not supported", field=f"{where}.{key}", hint=f"leave {key} out")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
    function["strict"] = tool.get("strict")
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _usage(answer: Mapping[str, Any]) -> Body:
    usage = answer.get("usage") or {}
    return {"input_tokens": usage.get("prompt_tokens") or 0, "output_tokens": usage.get("completion_tokens") or 0}


def _piece(block: Body, index: int) -> Body:
    """A block as the delta that would give it."""
    if block["type"] in SEALED:
        signature = block.get("signature")
        delta: Body = {"reasoning_content": block.get("thinking") or "", "thinking_blocks": [block]}
        if signature in REASONING_FIELDS:
            delta = {signature: block["thinking"]}
        return {"index": 0, "delta": delta}
    if block["type"] == "text":
        return {"index": 0, "delta": {"content": block["text"]}}
    function = {"name": block["name"], "arguments": plain(block["input"])}
    return {"index": 0, "delta": {"tool_calls": [{"index": index, "id": block["id"], "function": function}]}}
