"""Tool calls in sampled text: a closed registry of parsers by name.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them
    qwen     the same JSON style under the name that its users look for
    none     no parsing; everything is text

Text is never lost: a block whose JSON is malformed, or that is never closed, stays text with its tags and is
counted. White space around blocks that would be the only content is left out of the content (the ids keep
it).
"""

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from leyden.base.errors import ConfigError

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the OpenAI format wants it."""

    id: str
    """Random, unique."""
    name: str
    """Function name, as sampled; not checked against the tools on offer."""
    arguments: str
    """A JSON object as text."""


@dataclass(slots=True)
class Parsed:
    """What a piece of text gave."""

    content: str = ""
    """Text that is certainly content."""
    calls: list[ToolCall] = field(default_factory=list)
    """Complete calls."""


def _json_call(block: str) -> ToolCall | None:
    """The call in the text between two tags, or None if it is malformed."""
    try:
        value = json.loads(block)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments")
    if isinstance(arguments, str):
        # Some models quote the object once more; it counts if an object is inside.
        try:
            arguments = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", value["name"], json.dumps(arguments, ensure_ascii=False))


PARSERS: Mapping[str, Callable[[str], ToolCall | None] | None] = {
    "hermes": _json_call,
    "qwen": _json_call,
    "none": None,
}
"""By name in the configuration: from the text of a block to its call; None does not parse."""


def check_parser(name: str) -> None:
    """Raise ConfigError unless `name` is in the registry."""
    if name not in PARSERS:
        raise ConfigError(f"tool_parser = {name!r} is unknown; choose one of {', '.join(sorted(PARSERS))}")


class ToolStream:
    """Separates content from calls in text that arrives in pieces; how it is cut makes no difference."""

    def __init__(self, parser: str) -> None:
        self._parse = PARSERS[parser]
        self._held = ""
        self._blank = ""
        """White space at the beginning, content only if something follows."""
        self._begun = False
        self.num_calls = 0
        """Calls found."""
        self.num_malformed = 0
        """Blocks that stayed text."""

    def push(self, text: str) -> Parsed:
        """More text; what is certain now."""
        if self._parse is None:
            return Parsed(text)
        self._held += text
        out = Parsed()
        while True:
            at = self._held.find(OPEN)
            if at < 0:
                cut = len(self._held) - begins(self._held, OPEN)
                self._say(out, self._held[:cut])
                self._held = self._held[cut:]
                return out
            end = self._held.find(CLOSE, at)
            if end < 0:
                self._say(out, self._held[:at])
                self._held = self._held[at:]
                return out
            call = self._parse(self._held[at + len(OPEN) : end])
            end += len(CLOSE)
            if call is None:
                self.num_malformed += 1
                self._say(out, self._held[:end])
            else:
                self.num_calls += 1
                self._say(out, self._held[:at])
                out.calls.append(call)
            self._held = self._held[end:]

    def finish(self) -> Parsed:
        """No more text: what was held back is content."""
        out = Parsed()
        if self._parse is None:
            return out
        if self._held.startswith(OPEN):
            self.num_malformed += 1
        self._say(out, self._held)
        if not self._begun and not self.num_calls:
            out.content += self._blank
        self._held = self._blank = ""
        return out

    def _say(self, out: Parsed, text: str) -> None:
        if not self._begun:
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
            self._begun, self._blank = True, ""
        out.content += text


def parse(text: str, parser: str) -> tuple[str, list[ToolCall], int]:
    """(content, calls, malformed blocks) of a whole text."""
    stream = ToolStream(parser)
    parts = (stream.push(text), stream.finish())
    return "".join(p.content for p in parts), [c for p in parts for c in p.calls], stream.num_malformed


def begins(text: str, tag: str) -> int:
    """Length of the longest ending of `text` that begins `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)
