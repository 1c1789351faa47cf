"""OpenAI Responses: `v1/responses`, streaming and not, with function tools, reasoning and `previous_response_id`.

The engine answers it as chat. Ids of responses are those of calls, so a continuation is looked up in the trace
of its own attempt; nothing else is stored. Tools that OpenAI runs on its own side (web_search, ...) are refused
by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from leyden.base.errors import RequestRefused
from leyden.base.records import Call
from leyden.gateway.dialects.base import (
    Body,
    Earlier,
    ModelRequest,
    is_count,
    is_number,
    only_neutral,
    refuse_unknown,
    take,
)
from leyden.gateway.dialects.chat_engine import (
    ChatEngine,
    check_effort,
    check_format,
    check_tool_choice,
    first_message,
    reasoning_of,
)
from leyden.gateway.dialects.openai_wire import error_body, parse_alias
from leyden.gateway.dialects.responses_items import (
    Conversation,
    call_item,
    message_item,
    reasoning_item,
    turn_of,
)
from leyden.gateway.dialects.responses_stream import ResponseTranslator

_TAKEN = {
    "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens",
    "temperature", "top_p", "text", "previous_response_id", "store", "metadata", "include", "reasoning", "stream",
    "stream_options", "top_logprobs", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
}  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "truncation": ("disabled",),
    "background": (False,),
    "service_tier": ("auto", "default"),
}
_FIELDS = frozenset({*_TAKEN, *_NEUTRAL})
_LOGPROBS, _SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
_PREFIX = "resp_"
_ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "tools", "user")
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class OpenAIResponses(ChatEngine):
    """See `base.Dialect`."""

    name = "openai_responses"
    family = "openai"
    path = "responses"
    id_header = b"x-request-id"

    def parse(self, body: Body) -> ModelRequest:
        """Read a body. Raises RequestRefused that names the field."""
        refuse_unknown(body, _FIELDS, "Responses")
        only_neutral(body, _NEUTRAL)
        options = take(body, "stream_options", lambda v: isinstance(v, dict), "an object", {})
        if options.get("include_obfuscation"):
            raise RequestRefused(
                "stream_options.include_obfuscation is not supported", field="stream_options",
                hint="send false: nothing is padded here",
            )  # fmt: skip
        for key, what in (("store", "true or false"), ("parallel_tool_calls", "true or false")):
            take(body, key, lambda v: isinstance(v, bool), what)
        for key in ("previous_response_id", "instructions"):
            take(body, key, lambda v: isinstance(v, str), "a string")
        take(body, "metadata", lambda v: isinstance(v, dict), "an object")
        include = take(body, "include", lambda v: isinstance(v, list), "a list", [])
        for entry in include:
            if entry not in (_LOGPROBS, _SEALED):
                raise RequestRefused(
                    f"include has {entry!r}, which is not supported", field="include",
                    hint=f"supported: {_LOGPROBS}, {_SEALED}",
                )  # fmt: skip
        needs: dict[str, str] = {}
        engine = _engine_fields(body, needs, _LOGPROBS in include)
        request = ModelRequest(
            dialect=self.name, body=body, alias=parse_alias(body), asked=_asked(body),
            stream=take(body, "stream", lambda v: isinstance(v, bool), "true or false", False),
            logprobs_wanted=_LOGPROBS in include, engine=engine, needs=needs,
            previous=body.get("previous_response_id"),
        )  # fmt: skip
        return _with_messages(request, ())

    def resolve(self, request: ModelRequest, earlier: Earlier) -> ModelRequest:
        """The request after the answers that it continues, oldest first. Raises RequestRefused (404)."""
        return _with_messages(request, _items_before(request.previous, earlier.calls))

    def public(self, answer: Body, request: ModelRequest, call_id: str) -> Body:
        """What the harness gets of an unstreamed answer."""
        message, reason, _ = first_message(answer)
        public = self._head(answer, request, call_id)
        cut = _INCOMPLETE.get(reason)
        public["status"] = "incomplete" if cut or not reason else "completed"
        if cut:
            public["incomplete_details"] = {"reason": cut}
        public["output"] = _output(answer, message, request, call_id, public["status"])
        public["usage"] = _usage(answer.get("usage"))
        return public

    def translator(self, request: ModelRequest, call_id: str) -> ResponseTranslator:
        """The way of a new stream."""
        return ResponseTranslator(call_id, lambda chunk: self._head(chunk, request, call_id), request.logprobs_wanted)

    def replay(self, response: Mapping[str, Any], request: ModelRequest) -> bytes:
        """A stored answer as a whole stream."""
        public = dict(response)
        translator = ResponseTranslator(
            str(public.get("id", "")).removeprefix(_PREFIX),
            lambda chunk: {**public, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None},
            request.logprobs_wanted,
        )  # fmt: skip
        delta = turn_of(public.get("output") or ())
        if delta.get("tool_calls"):
            delta["tool_calls"] = [{**call, "index": i} for i, call in enumerate(delta["tool_calls"])]
        return translator.events({"choices": [{"index": 0, "delta": delta}]}) + translator.closing(public)

    def error_body(self, message: str, kind: str, field: str | None, hint: str | None) -> Body:
        """An error in the shape of the dialect."""
        return error_body(message, kind, field, hint)

    def _head(self, answer: Mapping[str, Any], request: ModelRequest, call_id: str) -> Body:
        """A response without what the model said."""
        body = request.body
        echoed = {key: body.get(key) for key in _ECHOED}
        return {
            "id": _PREFIX + call_id,
            "object": "response",
            "created_at": answer.get("created") or 0,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": request.alias,
            "output": [],
            **echoed,
            "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto",
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
            "text": body.get("text") or {"format": {"type": "text"}},
            "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
            "store": body.get("store") is not False,
            "truncation": "disabled",
            "usage": None,
        }


def _asked(body: Body) -> dict[str, Any]:
    checks = {
        "temperature": (lambda v: is_number(v) and 0 <= v <= 2, "a number from 0 to 2"),
        "top_p": (lambda v: is_number(v) and 0 < v <= 1, "a number above 0 and at most 1"),
    }
    asked = {key: take(body, key, check, what) for key, (check, what) in checks.items()}
    asked["max_tokens"] = take(body, "max_output_tokens", is_count, "a whole number of at least 1")
    return {key: value for key, value in asked.items() if value is not None}


def _engine_fields(body: Body, needs: dict[str, str], logprobs: bool) -> Body:
    """Fields for the engine beside the messages. Raises RequestRefused."""
    engine: Body = {}
    tools = take(body, "tools", lambda v: isinstance(v, list), "a list of tools", [])
    made = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    check_tool_choice(choice, [tool["function"]["name"] for tool in made])
    top = take(body, "top_logprobs", lambda v: type(v) is int and 0 <= v <= 20, "a whole number from 0 to 20")
    if top and not logprobs:
        raise RequestRefused(
            f"top_logprobs was sent without include = [{_LOGPROBS!r}]", field="top_logprobs",
            hint="ask for the log-probabilities with include",
        )  # fmt: skip
    text = take(body, "text", lambda v: isinstance(v, dict), "an object", {})
    if text.get("verbosity") not in (None, "medium"):
        raise RequestRefused(
            f"text.verbosity is {text['verbosity']!r}, which cannot be honoured here", field="text.verbosity",
            hint="leave it out, and ask for length in the prompt",
        )  # fmt: skip
    form = text.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
    reasoning = take(body, "reasoning", lambda v: isinstance(v, dict), "an object", {})
    for key, value in reasoning.items():
        if value is not None and (key, value) != ("summary", "auto") and key != "effort":
            raise RequestRefused(
                f"reasoning.{key} is {value!r}, which cannot be honoured here", field=f"reasoning.{key}",
                hint="reasoning is given as the engine gives it; leave the field out",
            )  # fmt: skip
    effort = check_effort(reasoning, "effort", "reasoning.effort")
    if effort is not None:
        needs["reasoning"] = "reasoning.effort"
    response_format = check_format(form, "text.format")
    if response_format is not None:
        needs["response_format"] = "text.format"
    engine = {
        "tools": made or None, "tool_choice": choice, "parallel_tool_calls": body.get("parallel_tool_calls"),
        "top_logprobs": top, "reasoning_effort": effort, "response_format": response_format,
    }  # fmt: skip
    return {key: value for key, value in engine.items() if value is not None}


def _tool(tool: Any, where: str) -> Body:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise RequestRefused(
            f"{where} is of type {kind!r}; only function tools can be offered to a model here", field=where,
            hint=f"leave {kind!r} out, or offer a function of your own that does it",
        )  # fmt: skip
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise RequestRefused(f"{where} has no name", field=f"{where}.name", hint="give the function a name")
    for key in tool:
        if key not in ("type", "name", "description", "parameters", "strict") and tool[key] is not None:
            raise RequestRefused(f"{where}.{key} is not supported", field=f"{where}.{key}", hint=f"leave {key} out")
    keys = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {key: tool[key] for key in keys if tool.get(key) is not None}}


def _with_messages(request: ModelRequest, before: Sequence[Any]) -> ModelRequest:
    """The request with the messages of `before`, its own after them, and its instructions in front."""
    body = request.body
    given = body.get("input")
    if isinstance(given, str):
        items: list[Any] = [{"role": "user", "content": given}]
    elif isinstance(given, list) and (given or before):
        items = given
    else:
        raise RequestRefused(
            "input must be a string or a list with at least one item", field="input",
            hint='send "..." or [{"role": "user", "content": "..."}]',
        )  # fmt: skip
    conversation = Conversation()
    if body.get("instructions"):
        conversation.messages.append({"role": "system", "content": body["instructions"]})
    conversation.add(before, "previous_response_id: item ")
    conversation.add(items)
    needs = dict(request.needs)
    if conversation.images is not None:
        needs["images"] = conversation.images
    return structs.replace(
        request, needs=needs, rewrites=("developer",) if conversation.developer else (),
        engine={"messages": conversation.messages, **{k: v for k, v in request.engine.items() if k != "messages"}},
    )  # fmt: skip


def _items_before(previous: str | None, calls: Sequence[Call]) -> list[Any]:
    """Items of every turn up to the answer `previous`. Raises RequestRefused."""
    by_id = {_PREFIX + call.id: call for call in calls if call.dialect == OpenAIResponses.name}
    turns: list[list[Any]] = []
    while previous is not None:
        call = by_id.pop(previous, None)
        if call is None or call.status != "ok" or call.response is None or call.request.get("store") is False:
            raise RequestRefused(
                f"there is no stored response {previous} in this attempt", status=404, kind="not_found",
                field="previous_response_id",
                hint="responses of other attempts, failed ones and those with store = false cannot be continued",
            )  # fmt: skip
        if call.refusal == "altered":
            raise RequestRefused(
                f"response {previous} was redacted when it was recorded, so it cannot be continued as it was",
                field="previous_response_id", hint="send the whole conversation as input",
            )  # fmt: skip
        given = call.request.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())
        turns.append([*items, *call.response.get("output", ())])
        previous = call.request.get("previous_response_id")
    return [item for turn in reversed(turns) for item in turn]


def _output(answer: Body, message: Body, request: ModelRequest, call_id: str, status: str) -> list[Body]:
    """What the model said as items: reasoning, text, calls."""
    name, reasoning = reasoning_of(message)
    items = []
    if reasoning:
        sealed = _SEALED in (request.body.get("include") or ())
        items.append(reasoning_item(call_id, name, reasoning, status, sealed))
    content, calls = message.get("content"), message.get("tool_calls") or ()
    if content or (content is not None and not calls):
        logprobs: Sequence[Body] = ()
        if request.logprobs_wanted:
            logprobs = ((answer["choices"][0].get("logprobs") or {}).get("content")) or ()
        items.append(message_item(call_id, content, status, logprobs))
    items += [call_item(call_id, index, call, status) for index, call in enumerate(calls)]
    for item in items[:-1]:
        item["status"] = "completed"  # only the last one can have been cut off
    return items


def _usage(usage: Any) -> Body | None:
    if not isinstance(usage, dict):
        return None
    read, sampled = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": read, "input_tokens_details": {"cached_tokens": cached}, "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": thought}, "total_tokens": read + sampled,
    }  # fmt: skip
