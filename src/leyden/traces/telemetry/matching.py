"""Whether a reported call is one that is recorded already: by the gateway, or from another report.

First by `leyden.call` (the `x-leyden-call` header of the answer), then by the id of the answer, then, where the report
has no such id, by model, time and answer among the calls that no other span of its scope claimed. Calls that contradict
each other in their text or their counts are never the same. A look-up does not search all calls: an attempt may report
thousands.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from leyden.base.records import Call, Span
from leyden.traces.telemetry.base import Report, ReportedCall
from leyden.traces.telemetry.meaning import OTEL

CLOCKS_S = 2.0
"""How far the clocks of an agent's machine and the gateway's may differ when calls are compared by time."""


class Recorded:
    """The calls of one attempt, and which of them were reported by which instrumentation."""

    def __init__(self, calls: Iterable[Call] = (), spans: Iterable[Span] = ()) -> None:
        self.by_id: dict[str, Call] = {}
        """Every call."""
        self._by_answer: dict[str, list[Call]] = {}
        self._claimed = {_claim(span) for span in spans if "call" in span.attributes}
        self._free: dict[str, dict[str, dict[str, Call]]] = {}  # by model, by scope: calls that it has not claimed
        self._by_model: dict[str, list[Call]] = {}
        for call in calls:
            self.add(call)

    def add(self, call: Call) -> None:
        """One more call."""
        self.by_id[call.id] = call
        answer = (call.response or {}).get("id")
        if isinstance(answer, str):
            self._by_answer.setdefault(answer, []).append(call)
        self._by_model.setdefault(call.alias, []).append(call)
        for free in self._free.get(call.alias, {}).values():
            free[call.id] = call

    def claim(self, call_id: str, scope: str) -> None:
        """An instrumentation has reported this call."""
        self._claimed.add((call_id, scope))
        call = self.by_id.get(call_id)
        if call is not None:
            self._free.get(call.alias, {}).get(scope, {}).pop(call_id, None)

    def same(self, report: Report, told: ReportedCall) -> str | None:
        """The id of the recorded call that a reported one is, None if it is news."""
        named = report.attributes.get("leyden.call")
        if isinstance(named, str) and named in self.by_id:
            return named
        if told.response_id is not None:
            alike: Iterable[Call] = self._by_answer.get(told.response_id, ())
        else:
            alike = self._unclaimed(told.model, report.scope).values()
        return next((call.id for call in alike if _overlap(report, call) and not _contradict(told, call)), None)

    def _unclaimed(self, model: str, scope: str) -> Mapping[str, Call]:
        of_model = self._free.setdefault(model, {})
        if scope not in of_model:
            of_model[scope] = {
                call.id: call for call in self._by_model.get(model, ()) if (call.id, scope) not in self._claimed
            }
        return of_model[scope]


def _claim(span: Span) -> tuple[str, str]:
    """(call, instrumentation) that a stored span says it reports."""
    around: Any = span.attributes.get(OTEL)
    scope = around.get("scope", "") if isinstance(around, Mapping) else ""
    return str(span.attributes["call"]), str(scope)


def _overlap(report: Report, call: Call) -> bool:
    ended_at = call.started_at + call.latency_ms / 1000
    return report.started_at - CLOCKS_S <= ended_at and call.started_at <= report.ended_at + CLOCKS_S


def _contradict(told: ReportedCall, call: Call) -> bool:
    said = [choice.text for choice in told.choices]
    kept = [choice.text for choice in call.choices]
    if any(said) and any(kept) and said != kept:
        return True
    counted = (call.response or {}).get("usage") or {}
    ours, theirs = counted.get("completion_tokens"), told.usage.get("completion_tokens")
    return ours is not None and theirs is not None and ours != theirs
