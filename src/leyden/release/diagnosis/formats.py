"""Failures of form: the model may have known, but what it wrote could not be used."""

import re
from collections.abc import Mapping

from leyden.release.diagnosis.base import Facts, Rule, shorten

_MARKUP = re.compile(r"</?(tool_call|function_call|tool_use|invoke)\b|<\|tool", re.IGNORECASE)


def _arguments(facts: Facts) -> str | None:
    for asked in facts.tool_calls:
        if not isinstance(asked.arguments, Mapping):
            return shorten(f"arguments of {asked.name!r} are no JSON object: {asked.arguments!r}")
    return None


def _markup(facts: Facts) -> str | None:
    """A tool call left in the text was not recognised as one."""
    return shorten(f"tool call in plain text: {facts.final_text}") if _MARKUP.search(facts.final_text) else None


def _component(facts: Facts) -> str | None:
    return facts.low_component("format", "formatted", "parses", "parse", "valid", "schema", "json")


def _empty(facts: Facts) -> str | None:
    if not facts.trace.calls or facts.final_text.strip() or facts.finish_reason in ("tool_calls", "tool_use"):
        return None
    return "the last answer is empty"


RULES = (
    Rule(name="arguments", category="format", meaning="arguments of a tool call are no JSON object", find=_arguments),
    Rule(name="markup", category="format", meaning="a tool call stands in the text, unparsed", find=_markup),
    Rule(name="malformed", category="format", meaning="a component named for format is low", find=_component),
    Rule(name="empty", category="format", meaning="the last answer is empty", find=_empty),
)
