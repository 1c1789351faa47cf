"""OpenAI Chat Completions: `v1/chat/completions`, streaming and not, with tools and `n`."""

from collections.abc import Mapping
from typing import Any

from leyden.base.errors import RequestRefused
from leyden.gateway.dialects.base import Body, Capture, ModelRequest, refuse_unknown, take
from leyden.gateway.dialects.openai_wire import (
    COMMON_FIELDS,
    error_body,
    merge_delta,
    parse_alias,
    parse_sampling,
    parse_stream,
)
from leyden.traces.tokens import RawChoice

_FIELDS = COMMON_FIELDS | {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens", "top_logprobs",
    "response_format",
}  # fmt: skip
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_PASSED = ("messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs")
_TOP_FIELDS = ("id", "object", "created", "model", "system_fingerprint", "service_tier")


class OpenAIChat:
    """See `base.Dialect`."""

    name = "openai_chat"
    path = "chat/completions"

    def parse(self, body: Body) -> ModelRequest:
        """Read a body. Raises RequestRefused that names the field."""
        refuse_unknown(body, _FIELDS, "Chat Completions")
        _check_messages(body.get("messages"))
        _check_tools(body)
        response_format = take(body, "response_format", lambda v: isinstance(v, dict), "an object")
        if response_format is not None and response_format.get("type") != "text":
            raise RequestRefused(
                f"response_format of type {response_format.get('type')!r} is not supported",
                field="response_format", hint='only {"type": "text"} is; ask for the format in the prompt',
            )  # fmt: skip
        logprobs = take(body, "logprobs", lambda v: isinstance(v, bool), "true or false", False)
        top = take(body, "top_logprobs", lambda v: isinstance(v, int) and 0 <= v <= 20, "a whole number from 0 to 20")
        if top and not logprobs:
            raise RequestRefused(
                "top_logprobs was sent without logprobs = true",
                field="top_logprobs",
                hint="set logprobs to true",
            )
        stream, usage_wanted = parse_stream(body)
        asked = parse_sampling(body, ("max_tokens", "max_completion_tokens"))
        return ModelRequest(
            dialect=self.name, body=body, alias=parse_alias(body), asked=asked, num_choices=asked.get("n", 1),
            stream=stream, usage_wanted=usage_wanted, logprobs_wanted=logprobs,
            ids_wanted=bool(body.get("return_token_ids")),
        )  # fmt: skip

    def engine_body(self, request: ModelRequest, used: Mapping[str, Any], model: str) -> Body:
        """The body for the engine, with `used` sampling parameters."""
        body = {key: request.body[key] for key in _PASSED if request.body.get(key) is not None}
        body.update(used, model=model, logprobs=True, return_token_ids=True)
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
            content = (choice.get("logprobs") or {}).get("content")
            message = choice.get("message") or {}
            choices.append(
                RawChoice(
                    index=choice.get("index", 0),
                    completion_ids=choice.get("token_ids"),
                    logprobs=None if content is None else [entry["logprob"] for entry in content],
                    finish_reason=choice.get("finish_reason") or "",
                    text=message.get("content") or "",
                )
            )
        return Capture(prompt_ids=answer.get("prompt_token_ids"), choices=choices, usage=answer.get("usage") or {})

    def public(self, answer: Body, request: ModelRequest) -> Body:
        """What the harness gets of an unstreamed answer."""
        public = {key: answer[key] for key in _TOP_FIELDS if key in answer}
        public["model"] = request.alias
        public["choices"] = [self._public_choice(choice, "message", request) for choice in answer.get("choices") or ()]
        if request.ids_wanted:
            public["prompt_token_ids"] = answer.get("prompt_token_ids")
        public["usage"] = answer.get("usage")
        return public

    def public_chunk(self, chunk: Body, request: ModelRequest) -> Body | None:
        """What the harness gets of one streamed chunk; None if nothing of it."""
        choices = chunk.get("choices") or ()
        if not choices and not request.usage_wanted:
            return None
        public = {key: chunk[key] for key in _TOP_FIELDS if key in chunk}
        public["model"] = request.alias
        public["choices"] = [self._public_choice(choice, "delta", request) for choice in choices]
        if request.ids_wanted and chunk.get("prompt_token_ids") is not None:
            public["prompt_token_ids"] = chunk["prompt_token_ids"]
        if request.usage_wanted:
            public["usage"] = None if choices else chunk.get("usage")
        return public

    def assembly(self, request: ModelRequest) -> "ChatAssembly":
        """An empty copy for a stream."""
        return ChatAssembly(request.num_choices)

    def chunks(self, response: Mapping[str, Any], request: ModelRequest) -> list[Body]:
        """A stored answer as the chunks of a stream, for a replay."""
        head = {key: response[key] for key in _TOP_FIELDS if key in response} | {"object": "chat.completion.chunk"}
        usage = {"usage": None} if request.usage_wanted else {}
        chunks: list[Body] = []
        for choice in response.get("choices") or ():
            delta = {key: value for key, value in (choice.get("message") or {}).items() if value is not None}
            if "tool_calls" in delta:
                delta["tool_calls"] = [{**call, "index": i} for i, call in enumerate(delta["tool_calls"])]
            parts = {key: choice[key] for key in ("logprobs", "token_ids") if key in choice}
            index = choice.get("index", 0)
            said = {"index": index, "delta": delta, **parts, "finish_reason": None}
            ended = {"index": index, "delta": {}, "finish_reason": choice.get("finish_reason")}
            chunks += [{**head, "choices": [piece], **usage} for piece in (said, ended)]
        if request.usage_wanted:
            chunks.append({**head, "choices": [], "usage": response.get("usage")})
        return chunks

    def error_body(self, message: str, kind: str, field: str | None, hint: str | None) -> Body:
        """An error in the shape of the dialect."""
        return error_body(message, kind, field, hint)

    def _public_choice(self, choice: Body, what: str, request: ModelRequest) -> Body:
        public = {
            "index": choice.get("index", 0),
            what: choice.get(what) or {},
            "finish_reason": choice.get("finish_reason"),
            "logprobs": choice.get("logprobs") if request.logprobs_wanted else None,
        }
        if request.ids_wanted and choice.get("token_ids") is not None:
            public["token_ids"] = choice["token_ids"]
        return public


class ChatAssembly:
    """See `base.Assembly`."""

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._top: Body = {}
        self._choices: dict[int, Body] = {}

    def add(self, chunk: Body) -> None:
        """Take one chunk of the engine in."""
        for key in (*_TOP_FIELDS, "prompt_token_ids", "usage"):
            if chunk.get(key) is not None:
                self._top[key] = chunk[key]
        for piece in chunk.get("choices") or ():
            choice = self._choices.get(piece.get("index", 0))
            if choice is None:
                choice = self._choices[piece.get("index", 0)] = {
                    "index": piece.get("index", 0), "message": {"role": "assistant", "content": None},
                    "finish_reason": None, "logprobs": None, "token_ids": None,
                }  # fmt: skip
            merge_delta(choice["message"], piece.get("delta") or {})
            content = (piece.get("logprobs") or {}).get("content")
            if content is not None:
                choice["logprobs"] = choice["logprobs"] or {"content": []}
                choice["logprobs"]["content"].extend(content)
            if piece.get("token_ids") is not None:
                choice["token_ids"] = choice["token_ids"] or []
                choice["token_ids"].extend(piece["token_ids"])
            if piece.get("finish_reason") is not None:
                choice["finish_reason"] = piece["finish_reason"]

    def complete(self) -> bool:
        """Whether every choice has its finish reason."""
        return len(self._choices) >= self._num_choices and all(
            choice["finish_reason"] is not None for choice in self._choices.values()
        )

    def body(self) -> Body:
        """The engine's answer as it would have been without streaming, as far as it has come."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in choices:
            message = choice["message"]
            if message.get("tool_calls") and message.get("content") == "":
                message["content"] = None  # an unstreamed answer that only calls tools has null content
        return {**self._top, "object": "chat.completion", "choices": choices}


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise RequestRefused(
            "messages must be a list with at least one message", field="messages",
            hint='send [{"role": "user", "content": "..."}]',
        )  # fmt: skip
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise RequestRefused(
                f"messages[{index}] has role {role!r}", field=f"messages[{index}].role",
                hint=f"use one of {', '.join(sorted(_ROLES))}",
            )  # fmt: skip
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(content, index)
        elif content is not None and not isinstance(content, str):
            raise RequestRefused(
                f"messages[{index}].content is a {type(content).__name__}",
                field=f"messages[{index}].content",
                hint="send a string or a list of text parts",
            )


def _check_parts(parts: list[Any], index: int) -> None:
    for position, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            field = f"messages[{index}].content[{position}]"
            raise RequestRefused(
                f"{field} is of type {kind!r}; only text parts can be trained on",
                field=field,
                hint='send {"type": "text", "text": "..."}',
            )


def _check_tools(body: Body) -> None:
    tools = take(body, "tools", lambda v: isinstance(v, list), "a list of tools", [])
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function" or not function.get("name"):
            raise RequestRefused(
                f"tools[{index}] is not a function tool", field=f"tools[{index}]",
                hint='send {"type": "function", "function": {"name": ...}}',
            )  # fmt: skip
    take(body, "tool_choice", lambda v: isinstance(v, str | dict), "a string or an object")
    take(body, "parallel_tool_calls", lambda v: isinstance(v, bool), "true or false")
    if body.get("tool_choice") not in (None, "none", "auto") and not tools:
        raise RequestRefused(
            "tool_choice was sent without tools",
            field="tool_choice",
            hint="send tools, or leave tool_choice out",
        )
