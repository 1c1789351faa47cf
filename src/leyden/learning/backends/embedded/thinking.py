"""Thinking and begun answers of the embedded engine: what a request says of them, and thoughts apart from the answer.

Thoughts stand between `<think>` and `</think>` at the beginning of an answer, as the templates of released models have
them; only a request that switches thinking on has them separated, as `reasoning_content`. White space around tags
belongs to neither part, as templates write it anew. Ids and log-probabilities are those of everything that was sampled.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from leyden.base.errors import RequestRefused
from leyden.learning.backends.embedded.tools import Parsed, ToolStream, begins

OPEN, CLOSE = "<think>", "</think>"
SWITCHES = ("enable_thinking", "thinking")
"""Names of the switch in chat templates."""

Thinks = Literal["no", "may", "begun"]
"""Whether an answer has thoughts to separate: none, perhaps, or it begins inside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a conversation is rendered."""

    thinking: bool | None = None
    """The switch of the template; None leaves it alone."""
    begun: bool = False
    """Whether the last message is the beginning of the answer."""

    @property
    def switches(self) -> dict[str, bool]:
        """For the template."""
        return {} if self.thinking is None else dict.fromkeys(SWITCHES, self.thinking)


PLAIN = Style()
"""A new turn, thinking as the template has it."""


def style_of(body: Mapping[str, Any]) -> Style:
    """What a request asks for, by the fields of vLLM's server. Raises RequestRefused."""
    begun, fresh = body.get("continue_final_message"), body.get("add_generation_prompt")
    for name, value in (("continue_final_message", begun), ("add_generation_prompt", fresh)):
        if value is not None and not isinstance(value, bool):
            raise RequestRefused(f"{name} is {value!r}; send true or false", field=name)
    if bool(begun) != (fresh is False):
        raise RequestRefused(
            f"continue_final_message = {bool(begun)} needs add_generation_prompt = {not begun}",
            field="continue_final_message" if begun else "add_generation_prompt",
        )
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping) or any(key not in SWITCHES for key in given):
        raise RequestRefused(
            f"chat_template_kwargs {given!r} are not supported; send {' and '.join(SWITCHES)} only",
            field="chat_template_kwargs",
        )
    values = set(given.values())
    if not values <= {True, False} or len(values) > 1:
        raise RequestRefused(f"chat_template_kwargs {given!r} do not agree; send true or false",
                             field="chat_template_kwargs")  # fmt: skip
    thinking = bool(values.pop()) if values else None
    if thinking and begun:
        raise RequestRefused(
            "an answer that is begun leaves no room for thinking before it; leave one of both out",
            field="continue_final_message",
        )
    return Style(thinking=thinking, begun=bool(begun))


_FIRST: Mapping[Thinks, Literal["before", "inside", "after", "done"]] = {
    "no": "done", "may": "before", "begun": "inside"
}  # fmt: skip


class ThoughtStream:
    """Separates thoughts from what follows, in text that arrives in pieces; how it is cut makes no difference."""

    def __init__(self, thinks: Thinks) -> None:
        self._state = _FIRST[thinks]
        self._held = ""
        self._blank = True
        """Whether nothing but white space was thought so far."""

    def push(self, text: str) -> tuple[str, str]:
        """More text; (thought, answer) that are certain now."""
        if self._state == "done":
            return "", text
        self._held += text
        if self._state == "before":
            bare = self._held.lstrip()
            if len(bare) < len(OPEN) and OPEN.startswith(bare):
                return "", ""
            self._state = "inside" if bare.startswith(OPEN) else "done"
            if self._state == "done":
                return "", self._all()
            self._held = bare[len(OPEN) :]
        thought = self._think() if self._state == "inside" else ""
        if self._state != "after":
            return thought, ""
        self._held = self._held.lstrip()
        if self._held:
            self._state = "done"
        return thought, self._all()

    def finish(self) -> tuple[str, str]:
        """No more text: what was held back."""
        held = self._all()
        if self._state != "inside":
            return "", held
        return (held.strip() if self._blank else held.rstrip()), ""

    def _think(self) -> str:
        """What is certainly thought; goes to `after` at the closing tag."""
        at = self._held.find(CLOSE)
        if at >= 0:
            thought, self._held = self._held[:at].rstrip(), self._held[at + len(CLOSE) :]
            self._state = "after"
        else:
            # White space at the end belongs to the tag if that is what follows.
            certain = self._held[: len(self._held) - begins(self._held, CLOSE)].rstrip()
            thought, self._held = certain, self._held[len(certain) :]
        if self._blank:
            thought = thought.lstrip()
            self._blank = not thought
        return thought

    def _all(self) -> str:
        held, self._held = self._held, ""
        return held


class Speech:
    """One answer taken apart: thoughts, content, tool calls."""

    def __init__(self, parser: str, thinks: Thinks) -> None:
        self._thoughts = ThoughtStream(thinks)
        self.tools = ToolStream(parser)
        """The part after the thoughts."""

    def push(self, text: str, *, last: bool) -> tuple[str, Parsed]:
        """(thought, what else) that more text makes certain."""
        thought, said = self._thoughts.push(text)
        if last:
            rest, more = self._thoughts.finish()
            thought, said = thought + rest, said + more
        parsed = self.tools.push(said)
        if last:
            parsed.content += self.tools.finish().content
        return thought, parsed
