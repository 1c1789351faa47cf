"""What a reported span means: a model call, the use of a tool, an exported record of Leyden, or anything else; and the
rewards that it brings.

Rewards are read from `leyden.reward.NAME` attributes, events `leyden.reward` (`name`, `value`, `call`), and from
Agent Lightning's `agentlightning.reward.0.name` and `.value`. Whether anybody may give rewards is not decided here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from leyden.traces.telemetry import CONVENTIONS
from leyden.traces.telemetry.base import Report, ReportedCall, ReportedReward, in_order, nested, text_of

EXPORT_SCOPE = "leyden.export"
"""Scope of the spans that we write ourselves."""
RECORD = "leyden.record"
"""Attribute that says which record such a span is: `attempt`, `call` or `span`."""
REWARD = "leyden.reward"
"""Name of events, and before a dot of attributes, that are rewards."""
OTEL = "otel"
"""Attribute of a stored span under which everything stands that OTLP knows beside attributes."""
MAX_NAME = 256
"""Longest name of a span in the store; a longer one is kept whole among the attributes."""

Kind = Literal["attempt", "call", "tool", "custom"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What is recorded of a span."""

    kind: Kind
    """`attempt` and spans of an export are what they were; the others are new."""
    name: str
    """Of the stored span."""
    attributes: Mapping[str, Any]
    """Of the stored span."""
    call: ReportedCall | None = None
    """The call, if it is one."""
    rewards: Sequence[ReportedReward] = ()
    """In order."""


def meaning_of(report: Report) -> Meaning:
    """What a span means. Never raises: what is not understood is `custom`, with all it had."""
    rewards = _rewards(report)
    for convention in CONVENTIONS:
        if convention.is_call(report):
            kept = {key: value for key, value in report.attributes.items() if not convention.holds_content(key)}
            around = _around(report, [event for event in report.events if not convention.holds_content(event.name)])
            call = convention.read_call(report)
            return Meaning(kind="call", name=_short(report.name), attributes=kept | around, call=call, rewards=rewards)
        tool = convention.read_tool(report)
        if tool is not None:
            told = {key: value for key, value in tool.items() if key != "name" and value is not None}
            attributes = dict(report.attributes) | told | _around(report, report.events)
            return Meaning(kind="tool", name=_short(str(tool["name"])), attributes=attributes, rewards=rewards)
    attributes = dict(report.attributes) | _around(report, report.events)
    return Meaning(kind="custom", name=_short(report.name), attributes=attributes, rewards=rewards)


def record_id(prefix: str, attempt_id: str, report: Report) -> str:
    """The id of what is recorded of a span: equal when an exporter sends it again.

    The attempt, the name and the times take part, because programs that seed Python's random numbers make equal span
    ids in every attempt, and in every process that they fork.
    """
    told = (attempt_id, report.trace_id, report.span_id, report.name, repr(report.started_at), repr(report.ended_at))
    return f"{prefix}_{blake2b(chr(0).join(told).encode('utf-8', 'replace'), digest_size=16).hexdigest()}"


def is_exported(report: Report) -> bool:
    """Whether Leyden wrote the span."""
    return report.scope == EXPORT_SCOPE and report.attributes.get(RECORD) in ("attempt", "call", "span")


def attempt_named(report: Report) -> tuple[str, str] | None:
    """(rollout id, attempt id) that a span, or the process that made it, names."""
    for attributes in (report.attributes, report.resource):
        for rollout, attempt in (
            ("leyden.rollout", "leyden.attempt"),
            ("agentlightning.rollout_id", "agentlightning.attempt_id"),
        ):
            found = attributes.get(rollout), attributes.get(attempt)
            if isinstance(found[0], str) and isinstance(found[1], str):
                return found[0], found[1]
    return None


def _short(name: str) -> str:
    return name[:MAX_NAME] or "(no name)"


def _around(report: Report, events: Sequence[Any]) -> dict[str, Any]:
    """Everything that OTLP tells beside attributes, as one attribute; what is empty is left out."""
    told = {
        "trace_id": report.trace_id,
        "span_id": report.span_id,
        "parent_span_id": report.parent_id,
        "name": report.name,
        "kind": report.kind,
        "error": report.failed,
        "message": report.message,
        "scope": report.scope,
        "resource": dict(report.resource),
        "events": [{"name": event.name, "at": event.at, "attributes": dict(event.attributes)} for event in events],
        "links": [dict(link) for link in report.links],
    }
    return {OTEL: {key: value for key, value in told.items() if value}}


def _rewards(report: Report) -> list[ReportedReward]:
    found = [
        ReportedReward(name=key[len(REWARD) + 1 :], value=value, at=report.ended_at)
        for key, value in report.attributes.items()
        if key.startswith(f"{REWARD}.") and len(key) > len(REWARD) + 1
    ]
    for event in report.events:
        if event.name == REWARD:
            told = event.attributes
            found.append(
                ReportedReward(
                    name=text_of(told.get("name")) or "reward",
                    value=told.get("value"),
                    call_id=told["call"] if isinstance(told.get("call"), str) else None,
                    source=told["source"] if isinstance(told.get("source"), str) else None,
                    at=event.at,
                )
            )
    found += [
        ReportedReward(name=text_of(one.get("name")) or "reward", value=one["value"], at=report.ended_at)
        for one in in_order(nested(report.attributes, "agentlightning.reward."))
        if "value" in one
    ]
    return found
