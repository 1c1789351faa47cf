"""What engines answer, looked at before it is believed: the shape of an answer, and errors in theirs.

An answer has an object per sampled token, of which one number is wanted. `read_chat` reads the numbers alone where
nothing else is asked for, which takes half the time; an answer that does not fit is read whole, so that its fault is
named as ever.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from leyden.gateway.dialects.base import Body, ModelRequest
from leyden.gateway.dialects.chat_engine import VALUES
from leyden.gateway.stream import read_json


class _Entry(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    message: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Answer(msgspec.Struct, gc=False):
    """What is kept of an answer; other fields are of no use to a harness that speaks one of our dialects."""

    choices: list[_Choice]
    id: Any = UNSET
    object: Any = UNSET
    created: Any = UNSET
    model: Any = UNSET
    system_fingerprint: Any = UNSET
    service_tier: Any = UNSET
    usage: dict[str, Any] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    leyden_prompt: Any = UNSET
    error: Any = UNSET


_DECODER = msgspec.json.Decoder(_Answer)
_FIELDS = tuple(name for name in _Answer.__struct_fields__ if name != "choices")


def read_chat(raw: bytes, request: ModelRequest) -> object:
    """An answer to a chat request as `read_json` gives it, but the log-probabilities as a list of numbers under
    `chat_engine.VALUES` where the harness does not want them itself."""
    if request.logprobs_wanted:
        return read_json(raw)
    try:
        read = _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return read_json(raw)
    answer: Body = {name: value for name in _FIELDS if (value := getattr(read, name)) is not UNSET}
    answer["choices"] = [_choice(choice) for choice in read.choices]
    return answer


def _choice(choice: _Choice) -> Body:
    logprobs = choice.logprobs
    values = None
    if logprobs is not None:
        content = logprobs.content
        values = {} if content is None else {VALUES: [entry.logprob for entry in content]}
    return {
        "index": choice.index, "message": choice.message, "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason, "token_ids": choice.token_ids, "logprobs": values,
    }  # fmt: skip


def fault_of(answer: object) -> str | None:
    """Why `answer` cannot be an answer of a model, None if it can.

    Only the shape is checked; tokens are the business of `traces.tokens`.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list):
        return "answered without a list of choices"
    for choice in choices:
        if not isinstance(choice, dict) or not isinstance(choice.get("index", 0), int):
            return "answered with a choice of a wrong shape"
        message, logprobs = choice.get("message"), choice.get("logprobs")
        if logprobs is not None and not isinstance(logprobs, dict):
            return "answered with log-probabilities of a wrong shape"
        if message is not None and not _is_message(message):
            return "answered with a message of a wrong shape"
    return None


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("content"), str | None):
        return False
    calls = message.get("tool_calls")
    return calls is None or (
        isinstance(calls, list)
        and all(isinstance(call, dict) and isinstance(call.get("function"), dict | None) for call in calls)
    )


def error_of(answer: object, status: int, endpoint: str) -> tuple[str, str]:
    """(message, type) of an answer that is an error."""
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or error), str(error.get("type") or "engine_error")
    return f"engine {endpoint} answered status {status}" + (f": {error}" if error else ""), "engine_error"
