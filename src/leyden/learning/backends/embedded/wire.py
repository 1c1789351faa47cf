"""The wire format of vLLM's OpenAI server: request bodies in, answers and chunks out. Pure; no HTTP, no
model.

A field that cannot be honoured exactly is refused with a 400 that names it. Fields whose value changes
nothing (`penalty: 0`) are taken. `return_token_ids` gives `prompt_token_ids` (chat: beside `choices`, in a
stream in the first chunk; completions: in each choice) and `token_ids` of each choice or chunk.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyden.base.errors import RequestRefused
from leyden.learning.backends.embedded.requests import SamplingRequest
from leyden.learning.backends.embedded.tools import ToolCall

Body = dict[str, Any]
MIN_TEMPERATURE = 1e-3
"""Smallest above 0: logits divided by less leave the range in which float32 tells tokens apart."""

# Values that change nothing; any other value of these fields is refused. None is always one of them.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "min_p": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "user": (),
}
_BOTH = (
    *(
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "n",
        "stop",
        "stop_token_ids",
        "stream",
    ),
    *("stream_options", "logprobs", "return_token_ids"),
)
_STYLE = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_CHAT = (*_BOTH, *_STYLE, "messages", "tools", "tool_choice", "max_completion_tokens")
_TEXT = (*_BOTH, "prompt")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the client wants to see in the answer."""

    chat: bool
    stream: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool


def read(
    body: Any, *, chat: bool, default_max_tokens: int, version: int
) -> tuple[Wishes, Callable[[Sequence[int]], SamplingRequest]]:
    """(what to show, request for given prompt ids). Raises RequestRefused for anything not understood."""
    if not isinstance(body, dict):
        raise RequestRefused(f"the body is a JSON {type(body).__name__}; send an object")
    _check_fields(body, _CHAT if chat else _TEXT)
    stream = _flag(body, "stream")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or set(options) - {"include_usage", "continuous_usage_stats"}:
        raise RequestRefused(f"stream_options {options!r} is not supported", field="stream_options")
    if options.get("continuous_usage_stats"):
        raise RequestRefused("continuous_usage_stats is not supported", field="stream_options.continuous_usage_stats")
    if options and not stream:
        raise RequestRefused("stream_options is only for stream = true; leave it out", field="stream_options")
    logprobs = _flag(body, "logprobs") if chat else _integer(body, "logprobs", 0, 1, -1) >= 0
    wishes = Wishes(chat, stream, bool(options.get("include_usage")), logprobs, _flag(body, "return_token_ids"))
    longest = max_tokens_of(body, default_max_tokens)
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise RequestRefused(f"stop is {stop!r}; send a string or a list of non-empty strings", field="stop")
    stop_ids = body.get("stop_token_ids") or []
    if not isinstance(stop_ids, list) or not all(type(i) is int for i in stop_ids):
        raise RequestRefused("stop_token_ids must be a list of integers", field="stop_token_ids")
    seed = body.get("seed")
    top_k = _integer(body, "top_k", -1, 1 << 31, 0)
    settings: Body = {
        "max_tokens": longest,
        "temperature": _number(body, "temperature", 0.0, 100.0, 1.0),
        "top_p": _number(body, "top_p", 0.0, 1.0, 1.0),
        "top_k": max(0, top_k),
        "seed": None if seed is None else _integer(body, "seed", -(1 << 63), (1 << 63) - 1, 0),
        "num_choices": _integer(body, "n", 1, 128, 1),
        "stop": tuple(stops),
        "stop_ids": frozenset(stop_ids),
        "stream": stream,
        "version": version,
    }
    if 0 < settings["temperature"] < MIN_TEMPERATURE:
        raise RequestRefused(
            f"temperature {settings['temperature']!r} is below {MIN_TEMPERATURE} but not 0; use 0 for greedy",
            field="temperature",
        )
    if settings["top_p"] == 0.0:
        raise RequestRefused("top_p is 0, which keeps no token; use temperature 0 for greedy", field="top_p")
    return wishes, lambda ids: SamplingRequest(prompt_ids=ids, **settings)


def max_tokens_of(body: Mapping[str, Any], default: int) -> int:
    """`max_completion_tokens` or `max_tokens`, or the policy's."""
    newer = body.get("max_completion_tokens") is not None
    older = body.get("max_tokens") is not None
    if newer and older and body["max_completion_tokens"] != body["max_tokens"]:
        raise RequestRefused("max_tokens and max_completion_tokens differ; send one", field="max_tokens")
    return _integer(body, "max_completion_tokens" if newer else "max_tokens", 1, 1 << 31, default)


def _check_fields(body: Mapping[str, Any], known: Sequence[str]) -> None:
    for name, value in body.items():
        if name in known or value is None or name == "user":
            continue
        neutral = _NEUTRAL.get(name)
        if neutral is None:
            raise RequestRefused(f"{name} is not supported by this engine; leave it out", field=name)
        if not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral):
            raise RequestRefused(
                f"{name} = {value!r} cannot be honoured by this engine; leave it out or send {neutral[0]!r}",
                field=name,
            )


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestRefused(f"{name} is {value!r}; send true or false", field=name)
    return bool(value)


def _number(body: Mapping[str, Any], name: str, low: float, high: float, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestRefused(f"{name} is {value!r}; send a number from {low:g} to {high:g}", field=name)
    return float(value)


def _integer(body: Mapping[str, Any], name: str, low: int, high: int, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise RequestRefused(f"{name} is {value!r}; send an integer from {low} to {high}", field=name)
    return value


def tools_of(body: Mapping[str, Any]) -> list[Any] | None:
    """The tools on offer. Raises RequestRefused."""
    tools = body.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise RequestRefused("tools must be a list of objects", field="tools")
    return tools


def error_body(error: RequestRefused) -> Body:
    """The error in OpenAI's shape."""
    plain = error.kind == "invalid_request_error"
    return {
        "error": {
            "message": str(error),
            "type": "invalid_request_error" if error.status < 500 else "server_error",
            "param": error.field,
            "code": None if plain else error.kind,
        }
    }


@dataclass(slots=True)
class Piece:
    """A part, or all, of one choice, ready to be shown."""

    index: int
    text: str
    calls: list[ToolCall]
    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    reasoning: str = ""


class Answer:
    """Builds the bodies of one answer. `token_text` names a token in log-prob lists."""

    def __init__(
        self, wishes: Wishes, model: str, prompts: Sequence[Sequence[int]], token_text: Callable[[int], str]
    ) -> None:
        self.wishes = wishes
        self.prompts = prompts
        self.is_spliced = False
        """Whether the prompt was built from served ids; said in `leyden_prompt`, a field of ours."""
        self._token_text = token_text
        self._num_calls: dict[int, int] = {}
        self._offset: dict[int, int] = {}
        kind = ("chat.completion" + (".chunk" if wishes.stream else "")) if wishes.chat else "text_completion"
        self._head: Body = {
            "id": f"{'chatcmpl' if wishes.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, pieces: Sequence[Piece]) -> Body:
        """The unstreamed answer; one piece per choice, in order."""
        choices = []
        for piece in pieces:
            choice = self._choice(piece)
            if self.wishes.chat:
                bare = not piece.text and (piece.calls or piece.reasoning)
                choice["message"] = {
                    "role": "assistant",
                    "content": None if bare else piece.text,
                    "refusal": None,
                    "tool_calls": [_call(call) for call in piece.calls],
                    **({"reasoning_content": piece.reasoning} if piece.reasoning else {}),
                }
            else:
                choice["text"] = piece.text
                if self.wishes.token_ids:
                    choice["prompt_token_ids"] = self._prompt_of(piece.index, len(pieces))
            choices.append(choice)
        body = {**self._head, "choices": choices, "usage": self.usage(sum(len(p.ids) for p in pieces))}
        if self.wishes.chat and self.wishes.token_ids:
            body["prompt_token_ids"] = self.prompts[0]
        return {**body, **self._prompt_facts()}

    def opening(self, index: int) -> Body:
        """The first chunk of a choice of a chat stream: its role."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        ids = {"prompt_token_ids": self.prompts[0]} if self.wishes.token_ids and index == 0 else {}
        return {**self._head, **ids, **self._prompt_facts(), "choices": [choice]}

    def _prompt_facts(self) -> Body:
        return {"leyden_prompt": "spliced"} if self.is_spliced else {}

    def chunk(self, piece: Piece, num_choices: int) -> Body:
        """A later chunk of a chat stream, or any chunk of a completion stream."""
        first = piece.index not in self._offset
        choice = self._choice(piece)
        if self.wishes.chat:
            delta: Body = {"content": piece.text} if piece.text or not (piece.calls or piece.reasoning) else {}
            if piece.reasoning:
                delta["reasoning_content"] = piece.reasoning
            if piece.calls:
                at = self._num_calls.get(piece.index, 0)
                self._num_calls[piece.index] = at + len(piece.calls)
                delta["tool_calls"] = [{"index": at + k, **_call(call)} for k, call in enumerate(piece.calls)]
            choice["delta"] = delta
        else:
            choice["text"] = piece.text
            if first and self.wishes.token_ids:
                choice["prompt_token_ids"] = self._prompt_of(piece.index, num_choices)
        return {**self._head, "choices": [choice]}

    def closing(self, num_sampled: int) -> Body:
        """The usage chunk that `stream_options.include_usage` asks for."""
        return {**self._head, "choices": [], "usage": self.usage(num_sampled)}

    def usage(self, num_sampled: int) -> Body:
        """Exact counts; the prompt counts once however many choices it has."""
        num_prompt = sum(len(p) for p in self.prompts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        }

    def _prompt_of(self, index: int, num_choices: int) -> Sequence[int]:
        return self.prompts[index // (num_choices // len(self.prompts))]

    def _choice(self, piece: Piece) -> Body:
        choice: Body = {
            "index": piece.index,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        choice["logprobs"] = self._logprobs(piece) if self.wishes.logprobs else None
        if self.wishes.token_ids:
            choice["token_ids"] = list(piece.ids)
        self._offset[piece.index] = self._offset.get(piece.index, 0) + len(piece.text)
        return choice

    def _logprobs(self, piece: Piece) -> Body:
        names = [self._token_text(token) for token in piece.ids]
        if self.wishes.chat:
            content = [
                {"token": name, "logprob": value, "bytes": list(name.encode()), "top_logprobs": []}
                for name, value in zip(names, piece.logprobs, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets, at = [], self._offset.get(piece.index, 0)
        for name in names:
            offsets.append(at)
            at += len(name)
        return {
            "tokens": names,
            "token_logprobs": list(piece.logprobs),
            # Alternatives are not computed; a list of the sampled tokens alone would pass for them.
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _call(call: ToolCall) -> Body:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
