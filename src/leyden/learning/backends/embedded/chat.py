"""Conversations become ids by the model's chat template, and by nothing else.

Promises: the ids are those of the rendered text without added special tokens; what cannot be rendered exactly
is refused with a 400 that names it (images, unknown roles, forced tool calls). A template that ignores tools
gets them Hermes-style in the system message; the `rendering` of the prompt says so and its hash differs.
`encode_demo` cuts a conversation exactly where generation would have begun. Roles are not mapped here.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import TemplateError

from leyden.base.errors import ModelUnusable, RequestRefused
from leyden.learning.backends.embedded import thinking
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.thinking import PLAIN, Style, Thinks
from leyden.learning.backends.embedded.tools import CLOSE, OPEN

ROLES = ("system", "user", "assistant", "tool")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "leyden_probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {}},
    },
}
_PROBE_THOUGHT = "leyden probe"
_MARK = "leydengoeson"
"""Stands behind a begun answer while it is rendered, to find where it ends."""
HERMES = (
    "You may call functions to help with the request. Their signatures, one JSON object a line:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, answer with a JSON object of its name and arguments inside tags:\n"
    '<tool_call>\n{{"name": "function-name", "arguments": {{"argument": "value"}}}}\n</tool_call>'
)
"""What a template that ignores tools gets in the system message."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation ready to be continued."""

    ids: list[int]
    """What the model reads."""
    template_hash: str
    """16 hex digits over the template, the rendering and the tools."""
    rendering: Literal["template", "hermes"]
    """Who rendered tools: the template, or the fallback because the template ignores them."""
    num_shared: int = 0
    """Ids at its beginning that are those served before, not encoded anew; see `splice`."""
    thinks: Thinks = "no"
    """Whether thoughts are to be separated from the answer."""


class ChatFormat:
    """The chat template of one model."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.template_knows_tools = self._knows_tools()
        self.template_knows_thinking = self._knows_thinking()

    def _knows_tools(self) -> bool:
        messages = [{"role": "user", "content": "probe"}]
        try:
            return "leyden_probe" in self.loaded.render(messages, tools=[_PROBE_TOOL])
        except (TemplateError, TypeError, KeyError, ValueError):
            # A template that stumbles over a plain tool cannot be relied on with tools.
            return False

    def _knows_thinking(self) -> bool:
        """Whether the template has a switch for thinking, and the tags of thoughts survive as text."""
        messages = [{"role": "user", "content": "probe"}]
        try:
            switches: list[dict[str, Any]] = [dict(Style(thinking=value).switches) for value in (True, False)]
            on, off = (self.loaded.render(messages, **one) for one in switches)
        except (TemplateError, TypeError, KeyError, ValueError):
            return False
        tags = thinking.OPEN + thinking.CLOSE
        return on != off and self.loaded.decode(self.loaded.encode(tags), skip_special=True) == tags

    def strips_reasoning(self) -> bool:
        """Whether the template leaves out what earlier turns thought. Raises RequestRefused."""
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": f"<think>\n{_PROBE_THOUGHT}\n</think>\n\nsecond"},
            {"role": "user", "content": "third"},
        ]
        return _PROBE_THOUGHT not in self.render_checked(turns, None, add_generation_prompt=True)

    def encode(
        self, messages: Any, tools: Sequence[Message] | None = None, tool_choice: Any = None, style: Style = PLAIN
    ) -> ChatPrompt:
        """The prompt for the next assistant turn, or for the rest of one. Raises RequestRefused."""
        check_tool_choice(tool_choice, tools)
        return self.encode_checked(check_messages(messages), tools, style)[0]

    def encode_checked(
        self, checked: list[dict[str, Any]], tools: Sequence[Message] | None, style: Style = PLAIN
    ) -> tuple[ChatPrompt, str]:
        """(the prompt of messages from `check_messages`, its text). Raises RequestRefused."""
        if style.thinking and not self.template_knows_thinking:
            raise RequestRefused(
                f"the chat template of {self.loaded.source} has no switch for thinking; leave thinking out, or set "
                "policies.NAME.chat_template to one that reads enable_thinking",
                field="chat_template_kwargs",
            )
        if style.begun:
            text, rendering = self._begun(checked, tools, style)
        else:
            text, rendering = self._render(checked, tools, add_generation_prompt=True, style=style)
        thinks: Thinks = "no"
        if style.thinking:
            thinks = "begun" if text.rstrip().endswith(thinking.OPEN) else "may"
        prompt = ChatPrompt(self.loaded.encode(text), self._hash(rendering, tools), rendering, thinks=thinks)
        return prompt, text

    def render_checked(
        self,
        checked: list[dict[str, Any]],
        tools: Sequence[Message] | None,
        *,
        add_generation_prompt: bool,
        style: Style = PLAIN,
    ) -> str:
        """The text of messages from `check_messages`. Raises RequestRefused."""
        return self._render(checked, tools, add_generation_prompt=add_generation_prompt, style=style)[0]

    def _begun(
        self, checked: list[dict[str, Any]], tools: Sequence[Message] | None, style: Style
    ) -> tuple[str, Literal["template", "hermes"]]:
        """The text up to the end of the last message, which the answer goes on with. Raises RequestRefused."""
        last = checked[-1]
        content = last["content"]
        if last["role"] != "assistant" or last.get("tool_calls") or not content or content != content.rstrip():
            raise RequestRefused(
                "continue_final_message needs a last message of the assistant that is text, is not empty and does "
                f"not end in white space; it is of role {last['role']!r} and ends {content[-20:]!r}",
                field="continue_final_message",
            )
        marked = [*checked[:-1], {**last, "content": content + _MARK}]
        whole, rendering = self._render(marked, tools, add_generation_prompt=False, style=style)
        text, found, _ = whole.rpartition(_MARK)
        if not found or _MARK in text or not text.endswith(content):
            raise RequestRefused(
                f"the chat template of {self.loaded.source} does not show the begun answer {content[:40]!r} as it is, "
                "so it cannot go on; end with a message of the user",
                field="continue_final_message",
            )
        return text, rendering

    def encode_demo(self, messages: Sequence[Message]) -> tuple[list[int], int]:
        """(ids, prompt_len): ids[:prompt_len] is what generation would have read, the rest the last assistant
        turn.

        The turn ends with the token that ends a generation. Raises ModelUnusable if the template renders a
        finished conversation with another beginning, RequestRefused if the conversation does not end with the
        assistant.
        """
        checked = check_messages(messages)
        if len(checked) < 2 or checked[-1]["role"] != "assistant":
            raise RequestRefused(
                "a demonstration must have a question and end with an assistant turn; its roles are "
                f"{[m['role'] for m in checked]}",
                field="messages",
            )
        asked, _ = self._render(checked[:-1], None, add_generation_prompt=True)
        whole, _ = self._render(checked, None, add_generation_prompt=False)
        if not whole.startswith(asked):
            raise ModelUnusable(
                f"the chat template of {self.loaded.source} renders a finished conversation with another "
                f"beginning than the prompt of its last turn, so demonstrations cannot be cut; "
                f"prompt: {asked!r}; whole: {whole!r}; set policies.NAME.chat_template to one that appends"
            )
        # Encoded apart: generation never lets a token cross from the prompt into the answer.
        prompt, turn = self.loaded.encode(asked), self.loaded.encode(whole[len(asked) :])
        end = next((i for i, token in enumerate(turn) if token in self.loaded.eos_ids), None)
        if end is None or self.loaded.decode(turn[end + 1 :]).strip():
            raise ModelUnusable(
                f"the chat template of {self.loaded.source} does not end the last assistant turn with one "
                f"end token (ids {list(self.loaded.eos_ids)}); prompt: {asked!r}; whole: {whole!r}"
            )
        return prompt + turn[: end + 1], len(prompt)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Message] | None,
        *,
        add_generation_prompt: bool,
        style: Style = PLAIN,
    ) -> tuple[str, Literal["template", "hermes"]]:
        speaks_tools = bool(tools) or any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
        rendering: Literal["template", "hermes"] = "template"
        if speaks_tools and not self.template_knows_tools:
            messages, tools, rendering = to_hermes(messages, tools or ()), None, "hermes"
        try:
            text = self.loaded.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, **style.switches
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise RequestRefused(
                f"the chat template of {self.loaded.source} cannot render these messages: {error}; change "
                "the messages or policies.NAME.chat_template",
                field="messages",
            ) from error
        return text, rendering

    def _hash(self, rendering: str, tools: Sequence[Message] | None) -> str:
        facts = [
            self.loaded.chat_template,
            rendering,
            HERMES if rendering == "hermes" else "",
            list(tools or ()),
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def check_tool_choice(tool_choice: Any, tools: Sequence[Message] | None) -> None:
    """Raise RequestRefused for a choice that sampling cannot guarantee."""
    if tool_choice in (None, "auto", "none"):
        return
    if isinstance(tool_choice, dict) or tool_choice == "required":
        raise RequestRefused(
            f"tool_choice {json.dumps(tool_choice)} forces a call, which this engine cannot guarantee; use 'auto'",
            field="tool_choice",
        )
    raise RequestRefused(f"tool_choice {tool_choice!r} is unknown; use 'auto' or 'none'", field="tool_choice")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as a template expects them: text content, tool arguments as objects. Raises RequestRefused."""
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestRefused("messages must be a list with at least one message", field="messages")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestRefused(f"{where} is {type(message).__name__}, not an object", field=where)
    role = message.get("role")
    if role not in ROLES:
        raise RequestRefused(f"{where}.role is {role!r}; known here: {', '.join(ROLES)}", field=f"{where}.role")
    unknown = [key for key, value in message.items() if key not in _KEYS and value not in (None, [], {})]
    if unknown:
        raise RequestRefused(f"{where}.{unknown[0]} is not supported; leave it out", field=f"{where}.{unknown[0]}")
    out = {key: message[key] for key in _KEYS if message.get(key) is not None}
    calls = message.get("tool_calls") or []
    content = message.get("content")
    if content is None and role != "assistant":
        raise RequestRefused(f"{where} has no content", field=f"{where}.content")
    out["content"] = _text(content, f"{where}.content")
    out.pop("tool_calls", None)
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise RequestRefused(f"{where}.tool_calls belongs to assistant messages, as a list", field=where)
        out["tool_calls"] = [_check_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return out


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefused(f"{where} is {type(content).__name__}; send a string or a list of parts", field=where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestRefused(
                f"{where}[{i}] has type {kind!r}; this model reads text only, send parts of type 'text'",
                field=f"{where}[{i}]",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _check_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestRefused(f"{where} is no function call with a name", field=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            # Templates print arguments with `tojson`, which would quote a string once more.
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise RequestRefused(
                f"{where}.function.arguments is not JSON: {error}", field=f"{where}.function.arguments"
            ) from None
    if not isinstance(arguments, dict):
        raise RequestRefused(f"{where}.function.arguments is no JSON object", field=f"{where}.function.arguments")
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def to_hermes(messages: Sequence[Message], tools: Sequence[Message]) -> list[dict[str, Any]]:
    """The same conversation in system, user and assistant texts only, tools and calls in tags."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            block = f"<tool_response>\n{message['content']}\n</tool_response>"
            if out and out[-1].get("is_response"):
                # Answers to parallel calls are one turn, as roles have to alternate in many templates.
                out[-1]["content"] += "\n" + block
            else:
                out.append({"role": "user", "content": block, "is_response": True})
            continue
        blocks = [message["content"]] if message["content"] else []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            text = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
            blocks.append(f"{OPEN}\n{text}\n{CLOSE}")
        out.append({"role": message["role"], "content": "\n".join(blocks)})
    if tools:
        offer = HERMES.format(tools="\n".join(json.dumps(t, ensure_ascii=False) for t in tools))
        if out and out[0]["role"] == "system":
            out[0]["content"] += "\n\n" + offer
        else:
            out.insert(0, {"role": "system", "content": offer})
    return [{key: value for key, value in message.items() if key != "is_response"} for message in out]
