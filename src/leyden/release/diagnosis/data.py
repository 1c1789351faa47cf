"""Failures of data and retrieval: what was needed was not there to be read."""

import re
from collections.abc import Mapping, Sequence

from leyden.release.diagnosis.base import Facts, Rule, shorten

_NOTHING = re.compile(
    r"^\W*$|^\W*(none|null)\W*$|\b(no|0|zero) (results?|matches|documents?|hits|records?|rows?|entries)\b|\bnot found\b"
    r"|\bnothing (was )?found\b|\bno such (file|table|document|record|column|key)\b|\bdoes not exist\b",
    re.IGNORECASE,
)
_LISTS = ("documents", "results", "hits", "rows", "matches")
_COUNTS = ("num_documents", "num_results", "num_hits", "num_rows", "count")


def _empty_result(facts: Facts) -> str | None:
    for result in facts.tool_results:
        if _NOTHING.search(result.text):
            return shorten(f"a tool answered: {result.text!r}")
    return None


def _retrieval_span(facts: Facts) -> str | None:
    for span in facts.trace.spans:
        if span.kind in ("state_before", "state_after") or not isinstance(span.attributes, Mapping):
            continue
        for name in _LISTS:
            found = span.attributes.get(name)
            if isinstance(found, Sequence) and not isinstance(found, str) and not found:
                return f"span {span.name!r} has no {name}"
        for name in _COUNTS:
            if span.attributes.get(name) == 0 and span.attributes.get(name) is not False:
                return f"span {span.name!r} has {name} 0"
    return None


def _component(facts: Facts) -> str | None:
    return facts.low_component("retrieval", "retrieved", "recall", "hit", "grounded")


RULES = (
    Rule(name="not_retrieved", category="data", meaning="a component named for retrieval is low", find=_component),
    Rule(name="nothing_found", category="data", meaning="a span says that nothing was retrieved", find=_retrieval_span),
    Rule(
        name="empty_result",
        category="data",
        meaning="a tool returned nothing, or that it is missing",
        find=_empty_result,
    ),
)
