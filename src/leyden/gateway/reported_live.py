"""Spans of live traffic: model calls that a service reports, without an attempt, become live calls without tokens.

Live traffic has calls only, so any other span is refused by name, and rewards are not taken. A call that the gateway
relayed, or that was reported before, is not made a second time where the report names it: by `leyden.call` or by the id
of the answer. A service tells of itself only; the administrator may bring back what `leyden export --live` wrote.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from leyden.base.errors import RecordError, RequestRefused
from leyden.base.records import LiveOrigin, check_id
from leyden.gateway.auth import Caller
from leyden.gateway.callers import origin_of
from leyden.gateway.reported import Result, durable, records_of
from leyden.gateway.road import Gateway
from leyden.traces.telemetry.base import Report, ReportedCall
from leyden.traces.telemetry.live import PURPOSE, SERVICE, SESSIONS, SUBJECTS
from leyden.traces.telemetry.matching import CLOCKS_S, Recorded
from leyden.traces.telemetry.meaning import RECORD, is_exported, meaning_of, record_id


def is_live_export(report: Report) -> bool:
    """Whether Leyden wrote the span of a live call."""
    return is_exported(report) and report.attributes.get(RECORD) == "call" and SERVICE in report.attributes


class LiveIngest:
    """Records reports of live traffic. One per gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def record(self, caller: Caller, reports: Sequence[Report], result: Result) -> None:
        """Store the calls of reports and add to `result` what could not be. Raises StoreError."""
        if not reports:
            return
        since = min(report.started_at for report in reports) - CLOCKS_S
        until = max(report.ended_at for report in reports) + CLOCKS_S
        # Two services may report at once; they never have each other's calls.
        reader = self._gateway.reader
        known = Recorded(await asyncio.to_thread(reader.live_calls, since=since, until=until))
        waiting: list[Future[Any]] = []
        for report in reports:
            try:
                waiting += await self._one(caller, report, known, result)
            except (RecordError, RequestRefused) as error:
                result.refuse(report, str(error))
        await durable(waiting)

    async def _one(self, caller: Caller, report: Report, known: Recorded, result: Result) -> "list[Future[Any]]":
        meaning = meaning_of(report)
        told = meaning.call
        if told is None:
            raise RecordError(f"live traffic keeps model calls only, and this is a span of kind {meaning.kind!r}")
        if report.failed and not told.choices and not is_live_export(report):
            raise RecordError("a call that failed without an answer is kept only as a span of an attempt")
        if meaning.rewards:
            names = ", ".join(sorted({reward.name for reward in meaning.rewards}))
            result.warnings.append(
                f"span {report.name[:80]!r} ({report.span_id}): stored without its rewards ({names}), since live "
                "traffic has none"
            )
        origin, call_id = self._origin(caller, report)
        if call_id in known.by_id or self._is_there(report, told, origin, known):
            return []
        seq = await self._gateway.live.take_place(self._gateway.reader)
        exported = caller.role != "service" and is_live_export(report)
        intent, completion = records_of(report, told, call_id, seq=seq, live=origin, exported=exported)
        recorder = self._gateway.recorder
        return [recorder.intent(intent), recorder.completion(completion)]

    @staticmethod
    def _is_there(report: Report, told: ReportedCall, origin: LiveOrigin, known: Recorded) -> bool:
        """Whether a report names a call of its own service that is recorded."""
        named = report.attributes.get("leyden.call")
        if told.response_id is None and named not in known.by_id:
            return False  # calls at one time are not told apart by anything else
        same = known.same(report, told)
        live = known.by_id[same].live if same is not None else None
        return live is not None and live.service == origin.service

    @staticmethod
    def _origin(caller: Caller, report: Report) -> tuple[LiveOrigin, str]:
        """(who is behind a reported call, its id). Raises RequestRefused, RecordError."""
        told: dict[str, tuple[str, bytes]] = {}
        for name, keys in (("session", SESSIONS), ("subject", SUBJECTS), ("purpose", (PURPOSE,))):
            for key in keys:
                value = _said(report, key)
                if value is not None:
                    told.setdefault(name, (key, value.encode()))
        service = caller.service or caller.role
        named = report.attributes.get("leyden.call")
        if caller.role != "service" and is_live_export(report):
            service = str(report.attributes[SERVICE])[:128]
            if named is not None:
                return origin_of(service, told, "attribute "), check_id(named, "leyden.call")
        return origin_of(service, told, "attribute "), record_id("otlp", f"live {service}", report)


def _said(report: Report, key: str) -> str | None:
    """A text among the attributes of a span or of the process that made it."""
    places: tuple[Mapping[str, Any], ...] = (report.attributes, report.resource)
    return next((attributes[key] for attributes in places if isinstance(attributes.get(key), str)), None)
