"""What a Messages request says of thinking, and of an answer that the harness has begun (prefill). Pure.

Engines know both by fields of vLLM's server: `chat_template_kwargs` switches thinking on or off in the chat template,
`thinking_token_budget` bounds it, `continue_final_message` lets the last message go on instead of a new one. A budget
that no answer can reach needs no engine that keeps to it.
"""

from collections.abc import Mapping
from typing import Any

from leyden.base.errors import RequestRefused
from leyden.gateway.dialects.base import BUDGET, Body, is_count, take
from leyden.gateway.dialects.chat_engine import REASONING_FIELDS

BEGUN: Mapping[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
"""Fields for an engine that lets the last message go on."""
SWITCHES = ("enable_thinking", "thinking")
"""Names by which chat templates know the switch; a template ignores the one that it does not know."""


def thinking_fields(thinking: Any, needs: dict[str, str]) -> Body:
    """Fields for the engine. Raises RequestRefused."""
    if thinking is None:
        return {}
    kind = thinking.get("type") if isinstance(thinking, dict) else thinking
    if not isinstance(thinking, dict) or kind not in ("disabled", "adaptive", "enabled"):
        raise RequestRefused(
            f"thinking of type {kind!r} is not supported", field="thinking",
            hint='send {"type": "enabled", "budget_tokens": ...}, {"type": "adaptive"} or {"type": "disabled"}',
        )  # fmt: skip
    known = ("type", "display", *(("budget_tokens",) if kind == "enabled" else ()))
    for key, value in thinking.items():
        if key not in known and value is not None:
            raise RequestRefused(
                f"thinking.{key} is not supported with the type {kind!r}", field=f"thinking.{key}",
                hint=f"leave {key} out",
            )  # fmt: skip
    if thinking.get("display") not in (None, "summarized"):
        raise RequestRefused(
            f"thinking.display is {thinking['display']!r}; thinking is given as the engine gives it",
            field="thinking.display", hint="leave display out",
        )  # fmt: skip
    fields: Body = {"chat_template_kwargs": dict.fromkeys(SWITCHES, kind != "disabled")}
    if kind != "disabled":
        needs.setdefault("reasoning", "thinking")
    if kind == "enabled":
        budget = take({"thinking.budget_tokens": thinking.get("budget_tokens")}, "thinking.budget_tokens", is_count,
                      "a whole number of at least 1")  # fmt: skip
        if budget is None:
            raise RequestRefused(
                "thinking of type 'enabled' has no budget_tokens", field="thinking.budget_tokens",
                hint="send budget_tokens, the most tokens of thinking",
            )  # fmt: skip
        needs["thinking_budget"] = "thinking.budget_tokens"
        fields[BUDGET] = budget
    return fields


def begun(turn: Mapping[str, Any], thinking: Any, where: str) -> Mapping[str, Any]:
    """Fields for an engine that goes on with `turn`, the last message, in the engine's form. Raises RequestRefused."""
    text = turn.get("content")
    wrong = hint = ""
    if turn.get("tool_calls") or any(turn.get(name) for name in REASONING_FIELDS):
        wrong, hint = "holds more than text", "begin it with text, or end with a message of the user"
    elif not text:
        wrong, hint = "is empty", "leave it out"
    elif text != text.rstrip():
        # What follows would be sampled behind a token that seldom ends in white space.
        wrong, hint = "ends in white space", "cut the white space off"
    elif isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive"):
        wrong, hint = "leaves no room for thinking before it", "leave thinking out, or end with a message of the user"
    if wrong:
        raise RequestRefused(
            f"the last message is the assistant's, so the answer begins with it; it {wrong}", field=where, hint=hint
        )
    return BEGUN
