"""OpenAI Chat Completions: `v1/chat/completions`, streaming and not, with tools and `n`.

It is also the engine's wire format, so a request is passed on field by field. One thing is not: the role
`developer` reaches the engine as `system`, since most chat templates know no other and some drop its messages
without a word.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from leyden.base.errors import RequestRefused
from leyden.gateway.dialects.base import Body, ModelRequest, event_bytes, refuse_unknown, take
from leyden.gateway.dialects.chat_engine import (
    TOP_FIELDS,
    ChatEngine,
    check_effort,
    check_format,
    check_tool_choice,
)
from leyden.gateway.dialects.openai_wire import (
    COMMON_FIELDS,
    DONE,
    ChunkTranslator,
    error_body,
    parse_alias,
    parse_sampling,
    parse_stream,
)

_FIELDS = COMMON_FIELDS | {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens", "top_logprobs",
    "response_format", "reasoning_effort",
}  # fmt: skip
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_PASSED = (
    "messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs", "reasoning_effort",
)  # fmt: skip
_TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
_NOTHING: Mapping[str, str] = {}


class OpenAIChat(ChatEngine):
    """See `base.Dialect`."""

    name = "openai_chat"
    family = "openai"
    path = "chat/completions"
    id_header = b"x-request-id"

    def parse(self, body: Body) -> ModelRequest:
        """Read a body. Raises RequestRefused that names the field."""
        refuse_unknown(body, _FIELDS, "Chat Completions")
        needs, developer = _check_messages(body.get("messages"))
        if not _TOOL_FIELDS.isdisjoint(body):
            _check_tools(body)
        if body.get("response_format") is not None and check_format(body["response_format"], "response_format"):
            needs = {**needs, "response_format": "response_format"}
        if body.get("reasoning_effort") is not None and check_effort(body, "reasoning_effort", "reasoning_effort"):
            needs = {**needs, "reasoning": "reasoning_effort"}
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
            ids_wanted=bool(body.get("return_token_ids")), needs=needs,
            rewrites=("developer",) if developer else (),
        )  # fmt: skip

    def engine_body(self, request: ModelRequest, used: Mapping[str, Any], model: str) -> Body:
        """The body for the engine, with `used` sampling parameters."""
        body = {key: request.body[key] for key in _PASSED if request.body.get(key) is not None}
        if request.rewrites:
            body["messages"] = [
                {**message, "role": "system"} if message["role"] == "developer" else message
                for message in body["messages"]
            ]
        if "response_format" in request.needs:
            body["response_format"] = request.body["response_format"]
        body.update(used, model=model, logprobs=True, return_token_ids=True)
        if request.stream:
            body.update(stream=True, stream_options={"include_usage": True})
        return body

    def public(self, answer: Body, request: ModelRequest, call_id: str) -> Body:
        """What the harness gets of an unstreamed answer."""
        public = {key: answer[key] for key in TOP_FIELDS if key in answer}
        public["model"] = request.alias
        public["choices"] = [_public_choice(choice, "message", request) for choice in answer.get("choices") or ()]
        if request.ids_wanted:
            public["prompt_token_ids"] = answer.get("prompt_token_ids")
        public["usage"] = answer.get("usage")
        return public

    def translator(self, request: ModelRequest, call_id: str) -> "ChatTranslator":
        """The way of a new stream."""
        return ChatTranslator(request)

    def replay(self, response: Mapping[str, Any], request: ModelRequest) -> bytes:
        """A stored answer as a whole stream."""
        head = {key: response[key] for key in TOP_FIELDS if key in response} | {"object": "chat.completion.chunk"}
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
        return b"".join(map(event_bytes, chunks)) + DONE

    def error_body(self, message: str, kind: str, field: str | None, hint: str | None) -> Body:
        """An error in the shape of the dialect."""
        return error_body(message, kind, field, hint)


class ChatTranslator(ChunkTranslator):
    """See `base.Translator`."""

    def _public(self, chunk: Body, choices: Sequence[Body]) -> Body:
        request = self._request
        public = {key: chunk[key] for key in TOP_FIELDS if key in chunk}
        public["model"] = request.alias
        public["choices"] = [_public_choice(choice, "delta", request) for choice in choices]
        if request.ids_wanted and chunk.get("prompt_token_ids") is not None:
            public["prompt_token_ids"] = chunk["prompt_token_ids"]
        if request.usage_wanted:
            public["usage"] = None if choices else chunk.get("usage")
        return public


def _public_choice(choice: Body, what: str, request: ModelRequest) -> Body:
    public = {
        "index": choice.get("index", 0),
        what: choice.get(what) or {},
        "finish_reason": choice.get("finish_reason"),
        "logprobs": choice.get("logprobs") if request.logprobs_wanted else None,
    }
    if request.ids_wanted and choice.get("token_ids") is not None:
        public["token_ids"] = choice["token_ids"]
    return public


def _check_messages(messages: object) -> tuple[Mapping[str, str], bool]:
    """(features that the messages need, whether one has the role `developer`). Raises RequestRefused."""
    if not isinstance(messages, list) or not messages:
        raise RequestRefused(
            "messages must be a list with at least one message", field="messages",
            hint='send [{"role": "user", "content": "..."}]',
        )  # fmt: skip
    needs = _NOTHING
    developer = False
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role.__class__ is not str or role not in _ROLES:
            raise RequestRefused(
                f"messages[{index}] has role {role!r}", field=f"messages[{index}].role",
                hint=f"use one of {', '.join(sorted(_ROLES))}",
            )  # fmt: skip
        if role == "developer":
            developer = True
        content = message.get("content")
        if isinstance(content, list):
            image = _check_parts(content, index)
            if image is not None:
                needs = {"images": image}
        elif content is not None and not isinstance(content, str):
            raise RequestRefused(
                f"messages[{index}].content is a {type(content).__name__}",
                field=f"messages[{index}].content",
                hint="send a string or a list of parts",
            )
    return needs, developer


def _check_parts(parts: list[Any], index: int) -> str | None:
    """Where the last image is, None if there is none. Raises RequestRefused."""
    image = None
    for position, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            continue
        field = f"messages[{index}].content[{position}]"
        url = part.get("image_url") if kind == "image_url" else None
        if not isinstance(url, dict) or not isinstance(url.get("url"), str) or not url["url"]:
            raise RequestRefused(
                f"{field} is of type {kind!r} or incomplete; text and images can be passed on",
                field=field,
                hint='send {"type": "text", "text": "..."}',
            )
        image = field
    return image


def _check_tools(body: Body) -> None:
    tools = take(body, "tools", lambda v: isinstance(v, list), "a list of tools", [])
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function" or not isinstance(name, str) or not name:
            raise RequestRefused(
                f"tools[{index}] is not a function tool", field=f"tools[{index}]",
                hint='send {"type": "function", "function": {"name": ...}}',
            )  # fmt: skip
    take(body, "parallel_tool_calls", lambda v: isinstance(v, bool), "true or false")
    if body.get("tool_choice") is not None:
        check_tool_choice(body["tool_choice"], [tool["function"]["name"] for tool in tools])
