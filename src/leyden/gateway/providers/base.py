"""What stands behind an alias: one family of wire formats, one file per member, registry in `__init__`.

The gateway speaks one format towards what answers, that of vLLM's server, with paths below `v1/`. A wire turns it
into the format of one kind of server and the answer back again: whole answers, and streams event by event. Engines
(`vllm`, `sglang`) return token ids; providers (`openai`, `anthropic`) do not, so their calls are recorded as
`retokenized` and never trained by RL. Wires are pure: they open no connection and read no configuration.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from leyden.base.config import PriceConfig
from leyden.gateway.dialects.base import Body, ModelRequest

Usage = Mapping[str, Any]


class Content(Protocol):
    """The body of an answer, as it comes."""

    def iter_any(self) -> AsyncIterator[bytes]:
        """Pieces as they arrive."""

    def at_eof(self) -> bool:
        """Whether everything was read, so that the connection may be used again."""


class Response(Protocol):
    """An answer whose body is not read yet."""

    @property
    def status(self) -> int:
        """HTTP status."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers."""

    @property
    def content(self) -> Content:
        """The body."""

    async def read(self) -> bytes:
        """The whole body."""

    def close(self) -> None:
        """Drop the connection."""

    def release(self) -> Any:
        """Give the connection back."""


class Headed(Response, Protocol):
    """An answer as a server gave it: `plain_http.Answer`, or aiohttp's own."""

    @property
    def headers(self) -> Mapping[str, str]:
        """By name in lower case."""


class StreamWire(Protocol):
    """One stream, its bytes turned into events of vLLM's server."""

    def feed(self, data: bytes) -> bytes:
        """What follows from these bytes."""


class Wire(Protocol):
    """One member of the family."""

    name: str
    """As the configuration names it."""
    takes_seed: bool
    """Whether a seed that the gateway chose is sent."""
    lists_models: bool
    """Whether `v1/models` says under which names it serves a policy."""
    whole_only: bool
    """Whether streams are asked for whole, because its streams lack what must be recorded."""
    flags: str
    """What to change on the server when it does not return token ids and log-probabilities."""

    def url(self, endpoint: str, path: str) -> str:
        """Where a request goes."""

    def headers(self, key: str) -> dict[str, str]:
        """What it is sent with; `key` may be empty."""

    def body(self, path: str, body: Body, request: ModelRequest | None) -> Body:
        """The body to send; `request` is None for a probe. Raises RequestRefused that names the field."""

    def answer(self, path: str, answer: Body) -> Body:
        """A whole answer in vLLM's shape."""

    def stream(self) -> StreamWire | None:
        """A fresh translator of a stream, None where nothing has to be translated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A provider that a route leads to."""

    name: str
    """As the configuration names it."""
    timeout_s: float
    """Longest wait for a whole answer."""
    price: PriceConfig | None
    """Of its tokens; None where it is not known."""


def cost_usd(price: PriceConfig, usage: Usage) -> float:
    """What a call cost by its usage in OpenAI's shape; `prompt_tokens` includes the cached ones."""
    details = usage.get("prompt_tokens_details")
    details = details if isinstance(details, Mapping) else {}
    return price.usd(
        _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"),
        num_cached=_count(details, "cached_tokens"), num_written=_count(details, "cache_creation_tokens"),
    )  # fmt: skip


def _count(usage: Usage, key: str) -> int:
    value = usage.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


class Translated:
    """An answer in another format, read as if a server of vLLM had sent it."""

    def __init__(self, inner: Response, wire: Wire, path: str, *, streaming: bool) -> None:
        self._inner = inner
        self._wire = wire
        self._path = path
        self._streaming = streaming

    @property
    def status(self) -> int:
        """HTTP status."""
        return self._inner.status

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers."""
        return self._inner.headers

    @property
    def content(self) -> "Translated":
        """The body."""
        return self

    def at_eof(self) -> bool:
        """Whether everything was read."""
        return self._inner.content.at_eof()

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Translated pieces as they arrive."""
        if self._streaming and self._wire.whole_only:
            answer = orjson.loads(await self.read())
            for chunk in chunks_of(answer, self._path):
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
            yield b"data: [DONE]\n\n"
            return
        translator = self._wire.stream()
        async for data in self._inner.content.iter_any():
            out = data if translator is None else translator.feed(data)
            if out:
                yield out

    async def read(self) -> bytes:
        """The whole body; as it came if it is no answer."""
        raw = await self._inner.read()
        if self._inner.status != 200:
            return raw
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return raw
        return orjson.dumps(self._wire.answer(self._path, answer)) if isinstance(answer, dict) else raw

    def close(self) -> None:
        """Drop the connection."""
        self._inner.close()

    def release(self) -> Any:
        """Give the connection back."""
        return self._inner.release()


def chunks_of(answer: Body, path: str) -> list[Body]:
    """A whole answer as the chunks that a stream of it would have had, with everything it says of tokens."""
    chat = path == "chat/completions"
    head: Body = {key: answer[key] for key in ("id", "created", "model") if key in answer}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    chunks: list[Body] = []
    for choice in answer.get("choices") or ():
        piece = {k: v for k, v in choice.items() if k not in ("message", "finish_reason", "meta_info")}
        if chat:
            delta = {key: value for key, value in (choice.get("message") or {}).items() if value is not None}
            if "tool_calls" in delta:
                delta["tool_calls"] = [{**call, "index": i} for i, call in enumerate(delta["tool_calls"])]
            piece["delta"] = delta
        said: Body = {**head, "choices": [{**piece, "finish_reason": choice.get("finish_reason")}]}
        if answer.get("prompt_token_ids") is not None and not chunks:
            said["prompt_token_ids"] = answer["prompt_token_ids"]
        chunks.append(said)
    chunks.append({**head, "choices": [], "usage": answer.get("usage")})
    return chunks
