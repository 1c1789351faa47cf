"""Failures with tools: the wrong call, or a tool that failed."""

import re
from collections.abc import Mapping

from leyden.release.diagnosis.base import Facts, Rule, shorten

_ERROR = re.compile(r"^\W*(error|exception|traceback|failed|failure|invalid|unauthorized|forbidden)\b", re.IGNORECASE)


def _wrong(facts: Facts) -> str | None:
    for asked in facts.tool_calls:
        if asked.fault is not None:
            return shorten(f"call of {asked.name!r}: {asked.fault}")
    return None


def _component(facts: Facts) -> str | None:
    return facts.low_component("tool", "tools")


def _failed(facts: Facts) -> str | None:
    for result in facts.tool_results:
        if result.is_error or _ERROR.search(result.text):
            return shorten(f"a tool answered: {result.text}")
    return None


def _span(facts: Facts) -> str | None:
    for span in facts.trace.spans:
        error = span.attributes.get("error") if isinstance(span.attributes, Mapping) else None
        if span.kind == "tool" and error:
            return shorten(f"tool {span.name!r} failed: {error}")
    return None


CALL_RULES = (
    Rule(name="wrong_call", category="tool", meaning="no such tool, or arguments it does not take", find=_wrong),
    Rule(name="tool_score", category="tool", meaning="a component named for tools is low", find=_component),
)
RESULT_RULES = (
    Rule(name="tool_failed", category="tool", meaning="a tool answered with an error", find=_failed),
    Rule(name="tool_span", category="tool", meaning="a span of kind tool has an error", find=_span),
)
