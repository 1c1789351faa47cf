"""What an instrumented program reported, as plain records: a span, the model call it stands for, a reward it brings.

Everything here is JSON values and text. A report is what somebody says that happened; what the gateway relayed itself
is known better, so calls made from reports carry no tokens.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NO_MODEL = "(not reported)"
"""Stands for the model of a call whose report does not name one."""

SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty")
"""Sampling parameters that all conventions have under the same names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedEvent:
    """Something within a span."""

    name: str
    """For example `exception`."""
    at: float
    """Seconds since the epoch."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A span as it was sent."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    parent_id: str = ""
    """Empty for a root."""
    name: str
    """Of the span."""
    kind: str = "internal"
    """`internal`, `server`, `client`, `producer`, `consumer` or `unspecified`."""
    started_at: float
    """Seconds since the epoch."""
    ended_at: float
    """Seconds since the epoch."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """JSON."""
    events: Sequence[ReportedEvent] = ()
    """In order."""
    links: Sequence[Mapping[str, Any]] = ()
    """`trace_id`, `span_id`, `attributes` of other spans."""
    failed: bool = False
    """Whether its status is an error."""
    message: str = ""
    """Of its status."""
    resource: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the process that made it."""
    scope: str = ""
    """Name of the instrumentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One answer of a reported call."""

    message: Mapping[str, Any]
    """As an assistant's message of Chat Completions."""
    finish_reason: str = ""
    """As it was reported; `tool_call` is written `tool_calls`."""

    @property
    def text(self) -> str:
        """Its content as one text."""
        return text_of(self.message.get("content"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCall:
    """A model call as somebody reported it."""

    model: str = NO_MODEL
    """What was asked for."""
    completion: bool = False
    """Whether a text was completed, instead of a conversation continued."""
    messages: Sequence[Mapping[str, Any]] = ()
    """As messages of Chat Completions; empty where the content was not reported."""
    tools: Sequence[Any] = ()
    """As tools of Chat Completions."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that were reported."""
    choices: Sequence[Said] = ()
    """Every answer; empty where the content was not reported."""
    usage: Mapping[str, int] = field(default_factory=dict)
    """`prompt_tokens`, `completion_tokens`, `total_tokens`, as far as reported."""
    response_id: str | None = None
    """Id that the model's server gave the answer."""

    def request(self) -> dict[str, Any]:
        """The body of the request that was made, as far as it is known."""
        body: dict[str, Any] = {"model": self.model}
        if self.completion:
            body["prompt"] = "".join(text_of(message.get("content")) for message in self.messages)
        else:
            body["messages"] = [dict(message) for message in self.messages]
        if self.tools:
            body["tools"] = list(self.tools)
        return body | dict(self.sampling)

    def response(self) -> dict[str, Any]:
        """The body of the answer, as far as it is known."""
        choices: list[dict[str, Any]] = []
        for index, said in enumerate(self.choices):
            content = {"text": said.text} if self.completion else {"message": dict(said.message)}
            choices.append({"index": index, **content, "finish_reason": said.finish_reason or None})
        kind = "text_completion" if self.completion else "chat.completion"
        named = {"id": self.response_id} if self.response_id else {}
        return {**named, "object": kind, "model": self.model, "choices": choices, "usage": dict(self.usage)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedReward:
    """A number that a report brings."""

    name: str
    """Component."""
    value: Any
    """As it was sent; whether it is a finite number is checked by whoever records it."""
    call_id: str | None = None
    """Of the call that it is about, if the report names one."""
    source: str | None = None
    """Who gave it, if the report says so."""
    at: float = 0.0
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """One way of naming attributes."""

    name: str
    """For people."""
    is_call: Callable[[Report], bool]
    """Whether the span is a model call."""
    read_call: Callable[[Report], ReportedCall]
    """The call that the span is."""
    holds_content: Callable[[str], bool]
    """Whether an attribute or event of this name is told by the call, so that the span need not repeat it."""
    read_tool: Callable[[Report], dict[str, Any] | None]
    """`name`, and `arguments`, `result`, `tool_call_id` as far as known, if the span is the use of a tool."""


def text_of(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [
            part if isinstance(part, str) else part.get("text") for part in content if isinstance(part, str | dict)
        ]
        return "".join(text for text in texts if isinstance(text, str))
    return ""


def from_json(value: Any) -> Any:
    """What a text spells as JSON, the text itself if it spells nothing; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return value


def _finite(text: str) -> float:
    """A number that JSON has. ValueError for NaN, infinity and what is as large."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def as_text(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def nested(attributes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The tree below `prefix` of attributes named with dots; where a name is both leaf and branch, the branch wins."""
    tree: dict[str, Any] = {}
    for key, value in attributes.items():
        if not key.startswith(prefix):
            continue
        *branches, leaf = key[len(prefix) :].split(".")
        node = tree
        for branch in branches:
            below = node.get(branch)
            node[branch] = node = below if isinstance(below, dict) else {}
        if not isinstance(node.get(leaf), dict):
            node[leaf] = value
    return tree


def in_order(tree: Any) -> list[dict[str, Any]]:
    """The members of a tree whose names are numbers of up to nine digits, in their order; gaps are allowed."""
    if not isinstance(tree, dict):
        return []
    keys = [key for key, value in tree.items() if key.isdecimal() and len(key) < 10 and isinstance(value, dict)]
    return [tree[key] for key in sorted(keys, key=int)]


def tool_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A tool call of an assistant's message."""
    function = {"name": as_text(name or ""), "arguments": as_text("" if arguments is None else arguments)}
    return {"id": as_text(call_id or ""), "type": "function", "function": function}


def reason_of(value: Any) -> str:
    """A finish reason in the words of Chat Completions."""
    return {"tool_call": "tool_calls"}.get(value, value) if isinstance(value, str) else ""


def usage_of(prompt: Any, completion: Any, total: Any = None) -> dict[str, int]:
    """Counts as far as they are whole numbers."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    found = {name: int(n) for name, n in counts.items() if isinstance(n, int | float) and n == n and abs(n) < 2**53}
    if "total_tokens" not in found and len(found) == 2:
        found["total_tokens"] = found["prompt_tokens"] + found["completion_tokens"]
    return found
