"""What the wire formats of OpenAI share: common fields, error shape, and the merging of streamed choices.

Does not know messages or prompts; `chat_engine` and `openai_completions` do.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from leyden.base.errors import RequestRefused
from leyden.gateway.dialects.base import Body, ModelRequest, event_bytes, is_count, is_number, take

COMMON_FIELDS = frozenset(
    {
        "model",
        "stop",
        "n",
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "stream",
        "stream_options",
        "logprobs",
        "user",
        "metadata",
        "presence_penalty",
        "frequency_penalty",
        "return_token_ids",
    }
)
"""Fields that mean the same in both dialects."""

MAX_CHOICES = 128
"""The bound of OpenAI's own API."""


def parse_sampling(body: Body, max_tokens_fields: tuple[str, ...]) -> dict[str, Any]:
    """Sampling parameters that were sent, under our names. Raises RequestRefused."""
    asked: dict[str, Any] = {}
    temperature = take(body, "temperature", lambda v: is_number(v) and 0 <= v <= 2, "a number from 0 to 2")
    top_p = take(body, "top_p", lambda v: is_number(v) and 0 < v <= 1, "a number above 0 and at most 1")
    seed = take(
        body, "seed", lambda v: isinstance(v, int) and not isinstance(v, bool) and abs(v) < 2**63,
        "a whole number of 64 bits",
    )  # fmt: skip
    stop = take(body, "stop", _is_stop, "a string or a list of up to 16 non-empty strings")
    n = take(body, "n", lambda v: is_count(v) and v <= MAX_CHOICES, f"a whole number from 1 to {MAX_CHOICES}")
    for key in max_tokens_fields:
        value = take(body, key, is_count, "a whole number of at least 1")
        if value is not None:
            asked["max_tokens"] = min(value, asked.get("max_tokens", value))
    others = {"temperature": temperature, "top_p": top_p, "seed": seed, "stop": stop, "n": n}
    asked.update({key: value for key, value in others.items() if value is not None})
    for key in ("presence_penalty", "frequency_penalty"):
        if body.get(key) not in (None, 0):
            raise RequestRefused(
                f"{key} is {body[key]!r}; only 0 is supported, since tokens would not be sampled from "
                "the model's own distribution",
                field=key,
                hint=f"leave {key} out",
            )
    return asked


def parse_stream(body: Body) -> tuple[bool, bool]:
    """(whether a stream was asked for, whether usage belongs in the answer)."""
    if "stream" not in body and "stream_options" not in body:
        return False, True
    stream = take(body, "stream", lambda v: isinstance(v, bool), "true or false", False)
    options = take(body, "stream_options", lambda v: isinstance(v, dict), "an object", {})
    for key in options:
        if key != "include_usage":
            raise RequestRefused(
                f"stream_options.{key} is not supported", field=f"stream_options.{key}",
                hint="only stream_options.include_usage is",
            )  # fmt: skip
    if options and not stream:
        raise RequestRefused(
            "stream_options was sent without stream = true", field="stream_options", hint="set stream to true"
        )
    return stream, not stream or bool(options.get("include_usage"))


def parse_alias(body: Body) -> str:
    """The model name. Raises RequestRefused."""
    alias = body.get("model")
    if not isinstance(alias, str) or not alias:
        raise RequestRefused(
            f"model is {alias!r}; it must be the name of a policy",
            field="model",
            hint="GET /v1/models lists them",
        )
    return alias


def error_body(message: str, kind: str, field: str | None, hint: str | None) -> Body:
    """OpenAI's error object, with the field and a hint beside it."""
    error: Body = {"message": message, "type": kind, "param": field, "code": kind}
    if field is not None:
        error["field"] = field
    if hint is not None:
        error["hint"] = hint
    return {"error": error}


class ChoiceAssembly:
    """The part of `base.Assembly` that does not depend on what a choice holds.

    A member says what an empty choice is and how a piece of text is added to it.
    """

    TOP_FIELDS: Sequence[str] = ()
    """Fields of a chunk that belong beside the choices of the answer."""

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._kept = (*self.TOP_FIELDS, "prompt_token_ids", "leyden_prompt", "usage")
        self._top: Body = {}
        self._choices: dict[int, Body] = {}

    def add(self, chunk: Body) -> None:
        """Take one chunk of the engine in."""
        for key in self._kept:
            if chunk.get(key) is not None:
                self._top[key] = chunk[key]
        for piece in chunk.get("choices") or ():
            index = piece.get("index", 0)
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = {
                    "index": index, **self._fresh(), "finish_reason": None, "logprobs": None, "token_ids": None
                }  # fmt: skip
            self._merge(choice, piece)
            if piece.get("token_ids") is not None:
                choice["token_ids"] = choice["token_ids"] or []
                choice["token_ids"].extend(piece["token_ids"])
            if piece.get("finish_reason") is not None:
                choice["finish_reason"] = piece["finish_reason"]
                if piece.get("stop_reason") is not None:
                    choice["stop_reason"] = piece["stop_reason"]

    def complete(self) -> bool:
        """Whether every choice has its finish reason."""
        return len(self._choices) >= self._num_choices and all(
            choice["finish_reason"] is not None for choice in self._choices.values()
        )

    @property
    def num_choices(self) -> int:
        """Choices that the engine has begun."""
        return len(self._choices)

    def body(self) -> Body:
        """The engine's answer as it would have been without streaming, as far as it has come."""
        return {**self._top, "choices": [self._choices[index] for index in sorted(self._choices)]}

    def _fresh(self) -> Body:
        raise NotImplementedError

    def _merge(self, choice: Body, piece: Body) -> None:
        raise NotImplementedError


DONE = b"data: [DONE]\n\n"
"""The last event of a stream of Chat Completions and Completions."""


class ChunkTranslator:
    """See `base.Translator`: the harness's events are the engine's, one for one, less what was not asked for."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request

    def events(self, chunk: Body) -> bytes:
        """What the harness gets of one chunk of the engine; empty if nothing."""
        choices = chunk.get("choices") or ()
        if not choices and not self._request.usage_wanted:
            return b""
        return event_bytes(self._public(chunk, choices))

    def closing(self, public: Body) -> bytes:
        """The events that end a stream."""
        return DONE

    def failure(self, message: str, kind: str) -> bytes:
        """The event that ends a stream that cannot go on."""
        return event_bytes(error_body(message, kind, None, None))

    def _public(self, chunk: Body, choices: Sequence[Body]) -> Body:
        raise NotImplementedError


def merge_delta(into: Body, delta: Mapping[str, Any]) -> None:
    """Add a streamed delta: strings and thinking blocks grow, tool calls are merged by index, else it is replaced."""
    for key, value in delta.items():
        if value is None:
            into.setdefault(key, None)
        elif key == "tool_calls":
            merge_tool_calls(into.setdefault("tool_calls", []), value)
        elif key == "thinking_blocks":
            into.setdefault(key, []).extend(value)
        elif key != "role" and isinstance(value, str) and isinstance(into.get(key), str):
            into[key] += value
        else:
            into[key] = value


def merge_tool_calls(calls: list[Body], deltas: list[Body]) -> None:
    """Add streamed pieces of tool calls; names and ids come once, arguments grow."""
    for delta in deltas:
        index = delta.get("index", 0)
        while len(calls) <= index:
            calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[index]
        call["id"] = delta.get("id") or call["id"]
        call["type"] = delta.get("type") or call["type"]
        function = delta.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""


def _is_stop(value: object) -> bool:
    if isinstance(value, str):
        return value != ""
    return isinstance(value, list) and 0 < len(value) <= 16 and all(isinstance(item, str) and item for item in value)
