"""A scripted provider: what a fake engine answers, and what goes wrong on the way.

`Reply` is what the model says; a reply function maps a request body to a Reply. `Faults` is what happens to
it. Token ids are made by a byte tokenizer: id = 3 + byte, ids below 3 are markers (1 begins a message, 2 ends
one).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

BEGIN, END, FIRST_BYTE = 1, 2, 3
"""Ids of the byte tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one choice says."""

    text: str = "ok"
    """Content."""
    tool_calls: tuple[tuple[str, str], ...] = ()
    """(function name, arguments as JSON text) of each tool call."""
    reasoning: str = ""
    """Said before the content, apart from it."""
    reasoning_field: str = "reasoning_content"
    """Where it is: newer versions of vLLM name it `reasoning`."""
    stop_reason: str | None = None
    """The stop string that ended it."""
    finish_reason: str | None = None
    """None: `tool_calls` if there are any, `length` if `max_tokens` cut it, else `stop`."""
    num_tokens: int | None = None
    """None: one token per byte of the text and an end; otherwise that many tokens, for benchmarks."""
    whole: bool = False
    """Not cut at `max_tokens`: a token of a real model holds several bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong. The defaults: nothing."""

    status: int = 200
    """Another status is answered with an error body."""
    fail_first: int = 2**62
    """How many requests are failed with `status` before the engine recovers."""
    retry_after_s: int | None = None
    """Sent as `retry-after` beside another status."""
    limits: tuple[tuple[str, str], ...] = ()
    """Headers beside every answer, as providers tell their limits."""
    drop: bool = False
    """Close the connection before the first byte."""
    cut_after_bytes: int | None = None
    """Close the connection after so many bytes of the answer's body."""
    wrong_usage: bool = False
    """Report one completion token too many."""
    missing: frozenset[str] = frozenset()
    """Any of `token_ids`, `prompt_token_ids`, `logprobs`: what the engine does not return."""
    nan_logprob: bool = False
    """The first log-probability is NaN, written as Python does."""
    error_in_stream: bool = False
    """An error event after the first chunk."""
    no_done: bool = False
    """End a stream without `[DONE]`."""
    no_json: bool = False
    """Answer with HTML."""
    extra_choices: int = 0
    """Choices that were not asked for."""
    missing_logprobs_of: int = 0
    """Tokens at the end of an answer that have ids but no log-probabilities."""
    no_tokenize: bool = False
    """Know no `/tokenize`, like an engine that cannot count."""


@dataclass(slots=True, kw_only=True)
class Behaviour:
    """Everything a fake engine can be told. May be changed while it runs."""

    reply: Callable[[Mapping[str, Any]], Reply] = lambda body: Reply()
    """What it says."""
    faults: Faults = field(default_factory=Faults)
    """What goes wrong."""
    delay_s: float = 0.0
    """Before the first byte."""
    chunk_delay_s: float = 0.0
    """Between chunks of a stream."""
    models: tuple[str, ...] = ()
    """What `/v1/models` lists."""
    models_text: str | None = None
    """Answered by `/v1/models` instead of a list, whatever it is."""
    models_status: int = 200
    """What `/v1/models` answers; above 499 a gateway takes the engine for down."""
    key: str = ""
    """Required as a bearer token or `x-api-key`, if set."""
    format: Literal["vllm", "sglang", "openai"] = "vllm"
    """Whose server it is; see `leyden.testing.formats`."""
    canned: bool = False
    """Unstreamed requests of one path all get the bytes of the first answer, for benchmarks."""


def text_ids(text: str) -> list[int]:
    """Ids of the byte tokenizer."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def prompt_ids(body: Mapping[str, Any]) -> list[int]:
    """Ids of a request's prompt: messages one after another, each begun and ended, and the begin of the
    answer.

    An assistant's turn is rendered as it was sampled (`completion_ids`), so a conversation that goes on extends
    its earlier prompt and answer; so does one whose last message is begun (`continue_final_message`).
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return list(prompt)
    if isinstance(prompt, str):
        return text_ids(prompt)
    ids: list[int] = []
    for message in body.get("messages", ()):
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text") or f"[{part['type']}]" for part in content)
        said = f"{message['role']}\n{content}"
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            said = _spoken(reasoning, content, [(call["name"], call["arguments"]) for call in calls])
        elif message["role"] == "tool":
            said = f"tool {message['tool_call_id']}\n{content}"
        ids += [BEGIN, *text_ids(said), END]
    return ids[:-1] if body.get("continue_final_message") else [*ids, BEGIN]


def thought(reply: Reply, body: Mapping[str, Any]) -> Reply:
    """The reply as the request lets a model think: not at all, or in so many tokens."""
    if (body.get("chat_template_kwargs") or {}).get("enable_thinking") is False:
        return replace(reply, reasoning="")
    budget = body.get("thinking_token_budget")
    return reply if budget is None else replace(reply, reasoning=reply.reasoning[:budget])


def completion_ids(reply: Reply, max_tokens: int | None) -> tuple[list[int], str]:
    """(ids of one choice, its finish reason)."""
    ids = [*text_ids(_spoken(reply.reasoning, reply.text, reply.tool_calls)), END]
    if reply.num_tokens is not None:
        ids = [FIRST_BYTE + index % 250 for index in range(reply.num_tokens)]
    reason = reply.finish_reason or ("tool_calls" if reply.tool_calls else "stop")
    if max_tokens is not None and len(ids) > max_tokens and not reply.whole:
        return ids[:max_tokens], "length"
    return ids, reason


def _spoken(reasoning: str, content: str, calls: Sequence[tuple[str, str]]) -> str:
    thought = f"({reasoning})" if reasoning else ""
    return thought + content + "".join(f"<{name}>{arguments}" for name, arguments in calls)


def logprob(position: int) -> float:
    """The log-probability at a position: exact in float32, different from its neighbours."""
    return -(1 + position % 7) / 8
