"""Anthropic's Messages API as a provider: chat requests into messages, answers and streams back into chat.

A chat request that Messages cannot honour (`n` above 1, `logprobs`, a seed that the harness sent, a response format)
is refused by name before anything is sent. The answer's thinking is given as `reasoning_content`, and as it came, with
its signature, in `thinking_blocks`. Thinking of earlier turns is sent again only as such a block, unchanged, since the
API wants its own signature beside it; what another engine has thought is left out. A harness that speaks Messages has
its `thinking` and `output_config` passed on; an answer that it has begun goes on.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from leyden.base.errors import RequestRefused
from leyden.gateway.dialects.anthropic_blocks import SEALED
from leyden.gateway.dialects.base import Body, ModelRequest
from leyden.gateway.dialects.chat_engine import REASONING_FIELDS

API_VERSION = "2023-06-01"
DEFAULT_MAX_TOKENS = 4096
"""The API wants a limit; a policy has one, so this is for what comes without."""
_REASONS = {
    "end_turn": "stop", "stop_sequence": "stop", "pause_turn": "stop", "max_tokens": "length",
    "model_context_window_exceeded": "length", "tool_use": "tool_calls", "refusal": "content_filter",
}  # fmt: skip
_ORDER = {"text": 1, "tool_use": 2}
"""Blocks that come after thinking where nothing else is said."""


class Anthropic:
    """See `base.Wire`."""

    name = "anthropic"
    takes_seed = False
    lists_models = False
    whole_only = False
    flags = "A provider returns no token ids"

    def url(self, endpoint: str, path: str) -> str:
        """Where a request goes."""
        return f"{endpoint.removesuffix('/v1')}/v1/messages"

    def headers(self, key: str) -> dict[str, str]:
        """What it is sent with."""
        return {"anthropic-version": API_VERSION, **({"x-api-key": key} if key else {})}

    def body(self, path: str, body: Body, request: ModelRequest | None) -> Body:
        """The request as Messages takes it. Raises RequestRefused that names the field."""
        if path != "chat/completions":
            raise _refused(path, "is no Messages API; call chat/completions", field="model")
        if body.get("n", 1) != 1:
            raise _refused(f"n is {body['n']}", "send n requests instead", field="n")
        own = request.body if request is not None and request.dialect == "anthropic" else None
        if own is None and body.get("response_format") and body["response_format"].get("type") != "text":
            raise _refused("response_format", "ask for the format in the prompt", field="response_format")
        if request is not None and request.logprobs_wanted:
            raise _refused("logprobs", "leave logprobs out", field="logprobs")
        if body.get("seed") is not None:
            raise _refused("seed", "leave seed out", field="seed")
        system, messages = _messages(body.get("messages") or [], _sealed(own))
        sent: Body = {
            "model": body["model"],
            "messages": messages,
            "max_tokens": body.get("max_tokens", DEFAULT_MAX_TOKENS),
        }
        if system:
            sent["system"] = system
        for name in ("temperature", "top_p"):
            if body.get(name, 1.0) != 1.0:  # newer models refuse both fields at once
                sent[name] = body[name]
        if body.get("stop"):
            stop = body["stop"]
            sent["stop_sequences"] = [stop] if isinstance(stop, str) else stop
        if body.get("tools"):
            sent["tools"] = [_tool(tool) for tool in body["tools"]]
            sent["tool_choice"] = _tool_choice(body.get("tool_choice"), body.get("parallel_tool_calls"))
        if body.get("stream"):
            sent["stream"] = True
        return sent | _thought(body, own)

    def answer(self, path: str, answer: Body) -> Body:
        """A message as a chat completion."""
        texts: list[str] = []
        thoughts: list[str] = []
        sealed: list[Body] = []
        calls: list[Body] = []
        for block in answer.get("content") or ():
            kind = block.get("type")
            if kind == "text":
                texts.append(block.get("text") or "")
            elif kind in SEALED:
                thoughts.append(block.get("thinking") or "")
                sealed.append(block)
            elif kind == "tool_use":
                arguments = orjson.dumps(block.get("input") or {}).decode()
                calls.append(_call(block.get("id"), block.get("name"), arguments))
        message: Body = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
        if sealed:
            message |= {"reasoning_content": "".join(thoughts), "thinking_blocks": sealed}
            kinds = [_ORDER.get(block.get("type"), 0) for block in answer["content"]]
            if kinds != sorted(kinds):
                message["content_blocks"] = answer["content"]  # it thought between what it said
        if calls:
            message["tool_calls"] = calls
        reason = _reason(answer.get("stop_reason"))
        return {
            "id": answer.get("id"),
            "object": "chat.completion",
            "created": 0,
            "model": answer.get("model"),
            "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
            "usage": _usage(answer.get("usage") or {}),
        }

    def stream(self) -> "MessageStream":
        """A fresh translator."""
        return MessageStream()


class MessageStream:
    """Events of a message into chunks of a chat completion. Where the bytes are cut makes no difference."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._head: Body = {"object": "chat.completion.chunk", "created": 0}
        self._usage: Body = {}
        self._num_calls = 0
        self._thought: Body | None = None

    def feed(self, data: bytes) -> bytes:
        """Chunks that follow from these bytes."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        out: list[bytes] = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                event = b"\n".join(self._data)
                self._data.clear()
                out += self._event(event)
        return b"".join(out)

    def _event(self, raw: bytes) -> list[bytes]:
        try:
            event = orjson.loads(raw)
        except orjson.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            return [_sse({"error": {"message": f"the provider streamed no JSON: {raw[:80]!r}"}})]
        match event.get("type"):
            case "message_start":
                message = event.get("message") or {}
                self._head.update(id=message.get("id"), model=message.get("model"))
                self._usage.update(message.get("usage") or {})
                return [self._chunk({"role": "assistant", "content": ""})]
            case "content_block_start":
                return self._block(event.get("content_block") or {})
            case "content_block_delta":
                return self._delta(event.get("delta") or {})
            case "content_block_stop" if self._thought is not None:
                block, self._thought = self._thought, None
                return [self._chunk({"thinking_blocks": [block]})]
            case "message_delta":
                self._usage.update({k: v for k, v in (event.get("usage") or {}).items() if v is not None})
                reason = (event.get("delta") or {}).get("stop_reason")
                return [self._chunk({}, _reason(reason))] if reason else []
            case "message_stop":
                usage = {**self._head, "choices": [], "usage": _usage(self._usage)}
                return [_sse(usage), b"data: [DONE]\n\n"]
            case "error":
                return [_sse({"error": event.get("error") or {"message": "the provider gave no reason"}})]
        return []  # ping, content_block_stop and what later versions add

    def _block(self, block: Body) -> list[bytes]:
        if block.get("type") in SEALED:
            self._thought = dict(block)
            return []
        if block.get("type") == "tool_use":
            call = {**_call(block.get("id"), block.get("name"), ""), "index": self._num_calls}
            self._num_calls += 1
            return [self._chunk({"tool_calls": [call]})]
        return [self._chunk({"content": block["text"]})] if block.get("text") else []

    def _delta(self, delta: Body) -> list[bytes]:
        match delta.get("type"):
            case "text_delta":
                return [self._chunk({"content": delta.get("text") or ""})]
            case "thinking_delta":
                self._grow("thinking", delta)
                return [self._chunk({"reasoning_content": delta.get("thinking") or ""})]
            case "signature_delta":
                self._grow("signature", delta)
            case "input_json_delta":
                grown = {"index": self._num_calls - 1, "function": {"arguments": delta.get("partial_json") or ""}}
                return [self._chunk({"tool_calls": [grown]})]
        return []

    def _grow(self, name: str, delta: Body) -> None:
        if self._thought is not None:
            self._thought[name] = (self._thought.get(name) or "") + (delta.get(name) or "")

    def _chunk(self, delta: Body, reason: str | None = None) -> bytes:
        return _sse({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def _sealed(own: Body | None) -> Iterator[list[Body]] | None:
    """Of each of the assistant's messages as a harness sent them: all its blocks in their order if a provider signed
    thinking among them, since none may be moved then; else nothing."""
    if own is None:
        return None
    turns = [message["content"] for message in own["messages"] if message["role"] == "assistant"]
    return iter([_signed(turn, turn) if isinstance(turn, list) else [] for turn in turns])


def _signed(blocks: Sequence[Body], around: Sequence[Body] = ()) -> list[Body]:
    """The blocks that a provider signed; with those `around` them, if there are any."""
    ours = (None, "", *REASONING_FIELDS)
    foreign = [
        block for block in blocks
        if block.get("type") in SEALED and (block.get("data") or block.get("signature") not in ours)
    ]  # fmt: skip
    if foreign and around:
        foreign = [block for block in around if block.get("type") not in SEALED or block in foreign]
    return [{key: value for key, value in block.items() if key != "cache_control"} for block in foreign]


def _thought(body: Body, own: Body | None) -> Body:
    """Fields about thinking: those of a harness that speaks Messages, else what chat says of it."""
    if own is not None:
        return {key: own[key] for key in ("thinking", "output_config") if own.get(key) is not None}
    effort = body.get("reasoning_effort")
    if effort in ("none", "minimal"):
        raise _refused(f"reasoning_effort {effort!r}", "ask for low or more, or leave it out", field="reasoning_effort")
    return {"output_config": {"effort": effort}} if effort is not None else {}


def _messages(messages: list[Body], sealed: Iterator[list[Body]] | None) -> tuple[str, list[Body]]:
    """(system text, messages). Neighbours of one role become one message: the API wants them to alternate."""
    system: list[str] = []
    made: list[Body] = []
    for index, message in enumerate(messages):
        role, where = message.get("role"), f"messages[{index}]"
        if role in ("system", "developer"):
            system.append(_text(message.get("content"), where))
            continue
        blocks = _blocks(message, where)
        if role == "assistant":
            whole = next(sealed) if sealed else []
            blocks = whole or [*_signed(message.get("thinking_blocks") or ()), *blocks]
        side = "assistant" if role == "assistant" else "user"
        if made and made[-1]["role"] == side:
            made[-1]["content"] += blocks
        elif blocks:
            made.append({"role": side, "content": blocks})
    return "\n\n".join(text for text in system if text), made


def _blocks(message: Body, where: str) -> list[Body]:
    if message.get("role") in ("tool", "function"):
        block = {
            "type": "tool_result", "tool_use_id": message.get("tool_call_id") or message.get("name"),
            "content": _text(message.get("content"), where),
        }  # fmt: skip
        return [block]
    content = message.get("content")
    if isinstance(content, str):
        blocks: list[Body] = [{"type": "text", "text": content}] if content else []
    else:
        blocks = [_part(part, f"{where}.content[{k}]") for k, part in enumerate(content or ())]
    for k, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        try:
            arguments = orjson.loads(function.get("arguments") or "{}")
        except orjson.JSONDecodeError:
            arguments = None
        if not isinstance(arguments, dict):
            field = f"{where}.tool_calls[{k}].function.arguments"
            raise _refused(f"{field} is no JSON object", "send the arguments as a JSON object", field=field)
        blocks.append({"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": arguments})
    return blocks


def _part(part: Body, where: str) -> Body:
    if part.get("type") == "text":
        return {"type": "text", "text": part.get("text") or ""}
    if part.get("type") == "image_url":
        url = str((part.get("image_url") or {}).get("url") or "")
        if url.startswith("data:") and ";base64," in url:
            kind, _, data = url[5:].partition(";base64,")
            return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
        return {"type": "image", "source": {"type": "url", "url": url}}
    raise _refused(f"{where} is of type {part.get('type')!r}", "send text or image_url parts", field=where)


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part(part, f"{where}.content[{k}]") for k, part in enumerate(content)]
    if any(part["type"] != "text" for part in parts):
        raise _refused(f"{where} has parts that are no text", "send text only here", field=where)
    return "".join(part["text"] for part in parts)


def _tool(tool: Body) -> Body:
    function = tool.get("function") or {}
    made = {"name": function.get("name"), "input_schema": function.get("parameters") or {"type": "object"}}
    if function.get("description"):
        made["description"] = function["description"]
    return made


def _tool_choice(choice: Any, parallel: bool | None) -> Body:
    if isinstance(choice, dict):
        made: Body = {"type": "tool", "name": (choice.get("function") or {}).get("name")}
    else:
        made = {"type": {"none": "none", "required": "any"}.get(choice or "auto", "auto")}
    if parallel is False and made["type"] != "none":
        made["disable_parallel_tool_use"] = True
    return made


def _call(call_id: Any, name: Any, arguments: str) -> Body:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _reason(reason: Any) -> str:
    return _REASONS.get(reason, str(reason or ""))


def _usage(usage: Body) -> Body:
    """Counts in OpenAI's shape, where the prompt includes what came from the cache."""
    read = usage.get("cache_read_input_tokens") or 0
    written = usage.get("cache_creation_input_tokens") or 0
    prompt = (usage.get("input_tokens") or 0) + read + written
    completion = usage.get("output_tokens") or 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": read, "cache_creation_tokens": written},
    }


def _sse(body: Body) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _refused(what: str, hint: str, *, field: str) -> RequestRefused:
    return RequestRefused(f"the provider behind this model (Anthropic) cannot honour {what}", field=field, hint=hint)
