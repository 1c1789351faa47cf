"""Spans that a harness reports, recorded: calls without tokens, uses of tools, rewards, and everything else as it is.

A span that is sent again is stored once, since its id follows from what it says. A call that the gateway relayed itself
is not made a second time: its span is stored and points to it. Every row is durable when `record` returns.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

from leyden.base.errors import Conflict, RecordError, RequestRefused
from leyden.base.records import Call, CallCompletion, CallIntent, LiveOrigin, Reward, Span, check_id, check_reward
from leyden.gateway.auth import KnownAttempt, Role
from leyden.gateway.road import Gateway
from leyden.traces.telemetry.base import Report, ReportedCall, ReportedReward
from leyden.traces.telemetry.matching import Recorded
from leyden.traces.telemetry.meaning import RECORD, Meaning, is_exported, meaning_of, record_id
from leyden.traces.tokens import RawChoice, checked

DIALECT = "otlp"
"""Dialect of calls that were reported; their bodies have the shape of Chat Completions, or of Completions."""
FAILED_STATUS = 502
"""HTTP status of a failed call whose report does not tell it: to the harness, whatever it called failed."""
SPANS_AT_ONCE = 64
"""Spans between two chances for the calls that pass through the same process."""
SOURCES = ("verifier", "agent", "api")
"""Who may have given an exported reward."""


@dataclass(slots=True)
class Result:
    """What became of a request."""

    refused: list[str] = field(default_factory=list)
    """One reason for every span that was not stored."""
    warnings: list[str] = field(default_factory=list)
    """What was not taken of spans that were stored."""

    def refuse(self, report: Report, reason: str) -> None:
        """A span is not stored."""
        self.refused.append(f"span {report.name[:80]!r} ({report.span_id}): {reason}")


@dataclass(slots=True)
class _Page:
    """What is known of an attempt while spans of it are recorded."""

    role: Role
    known: KnownAttempt
    calls: Recorded
    kept: dict[str, Report]
    """By the ids that an import keeps, and which must not be those of another attempt."""


class Ingest:
    """Records reports. One per gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        # Two instrumentations that report one call at once must see each other's; a lock lives as long as it is used.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def attempt(self, rollout_id: str, attempt_id: str) -> KnownAttempt:
        """The attempt that a span names. Raises RequestRefused (404)."""
        return await self._gateway.keys.attempt(rollout_id, attempt_id)

    async def record(self, role: Role, known: KnownAttempt, reports: Sequence[Report], result: Result) -> None:
        """Store the spans of one attempt and add to `result` what could not be. Raises StoreError."""
        if not reports:
            return
        meanings = await asyncio.to_thread(lambda: [(report, meaning_of(report)) for report in reports])
        attempt_id = known.attempt.id
        async with self._locks.setdefault(attempt_id, asyncio.Lock()):
            page = _Page(role, known, Recorded(), {})
            if any(meaning.call is not None or meaning.rewards for _, meaning in meanings):
                page.calls = Recorded(*await asyncio.to_thread(self._stored, attempt_id))
            waiting: list[Future[None]] = []
            for number, (report, meaning) in enumerate(meanings):
                if number % SPANS_AT_ONCE == 0:
                    await asyncio.sleep(0)
                try:
                    waiting += await self._one(page, report, meaning, result)
                except (RecordError, RequestRefused) as error:
                    result.refuse(report, str(error))
            await durable(waiting)
            if page.kept:
                calls, spans = await asyncio.to_thread(self._stored, attempt_id)
                there = {call.id for call in calls} | {span.id for span in spans}
                for taken in sorted(page.kept.keys() - there):
                    result.refuse(page.kept[taken], f"the store has {taken} already, in another attempt")

    def _stored(self, attempt_id: str) -> tuple[list[Call], list[Span]]:
        reader = self._gateway.reader
        return reader.calls_of(attempt_id), reader.spans_of(attempt_id)

    async def _one(self, page: _Page, report: Report, meaning: Meaning, result: Result) -> list["Future[None]"]:
        """Queue the rows of one span. Raises RecordError before anything is queued if the span cannot be stored."""
        exported = is_exported(report)
        record = report.attributes.get(RECORD) if exported else None
        rewards = self._rewards(page, report, meaning, result)
        recorder = self._gateway.recorder
        call_id: str | None = None
        waiting: list[Future[None]] = []
        if meaning.call is not None and (meaning.call.choices or not report.failed or record == "call"):
            call_id = page.calls.same(report, meaning.call)
            if call_id is None or call_id == self._call_id(page, report):
                call_id = self._call_id(page, report)
                waiting += await self._call(page, report, meaning.call, call_id)
            page.calls.claim(call_id, report.scope)
        if record == "span":
            waiting.append(recorder.span(_restored(page, report)))
        elif record is None:
            waiting.append(recorder.span(_span(page, report, meaning, call_id)))
        if rewards:
            rewards = [replace(reward, call_id=reward.call_id or call_id) for reward in rewards]
            key = record_id("reward", page.known.attempt.id, report)
            waiting.append(recorder.rewards(page.known.rollout.id, page.known.attempt.id, rewards, once=key))
        return waiting

    def _rewards(self, page: _Page, report: Report, meaning: Meaning, result: Result) -> list[Reward]:
        """The rewards that may be given. RecordError for what is no finite number."""
        if not meaning.rewards:
            return []
        checked_values = [check_reward(reward.name, reward.value) for reward in meaning.rewards]
        if page.role == "attempt" and not self._gateway.config.rewards.from_agent:
            names = ", ".join(sorted({reward.name for reward in meaning.rewards}))
            result.warnings.append(
                f"span {report.name[:80]!r} ({report.span_id}): stored without its rewards ({names}), since an attempt "
                "may not reward itself here; set rewards.from_agent = true, or let a verifier give the reward"
            )
            return []
        for reward in meaning.rewards:
            if reward.call_id is not None and reward.call_id not in page.calls.by_id:
                raise RecordError(
                    f"reward {reward.name!r} is for call {reward.call_id}, which the attempt does not have"
                )
        return [
            Reward(
                name=reward.name, value=value, source=_source(page.role, reward), call_id=reward.call_id,
                created_at=reward.at or time.time(),
            )
            for reward, value in zip(meaning.rewards, checked_values, strict=True)
        ]  # fmt: skip

    @staticmethod
    def _call_id(page: _Page, report: Report) -> str:
        """The id of a call that is made. An import by the administrator keeps the one it had."""
        named = report.attributes.get("leyden.call")
        if page.role != "attempt" and is_exported(report) and named is not None:
            page.kept[check_id(named, "leyden.call")] = report
            return str(named)
        return record_id("otlp", page.known.attempt.id, report)

    async def _call(self, page: _Page, report: Report, told: ReportedCall, call_id: str) -> list["Future[None]"]:
        """Queue a call that is news; one that is stored already is left alone."""
        before = page.calls.by_id.get(call_id)
        if before is not None and before.status != "open":
            return []
        known, gateway = page.known, self._gateway
        seq = await known.book.take_place(gateway.reader) if before is None else before.seq
        exported = page.role != "attempt" and is_exported(report)
        intent, completion = records_of(report, told, call_id, seq=seq, known=known, exported=exported)
        waiting: list[Future[Any]] = []
        if gateway.worker[1] > 1:
            waiting.append(gateway.recorder.numbered_intent(intent, lambda seq: intent.sampling))
        else:
            waiting.append(gateway.recorder.intent(intent))
        waiting.append(gateway.recorder.completion(completion))
        page.calls.add(_as_call(intent, completion))
        return waiting


def records_of(
    report: Report, told: ReportedCall, call_id: str, *, seq: int, exported: bool,
    known: KnownAttempt | None = None, live: LiveOrigin | None = None,
) -> tuple[CallIntent, CallCompletion]:  # fmt: skip
    """A reported call as records: of an attempt, or of live traffic. An exported one keeps its policy."""
    attributes: Mapping[str, Any] = report.attributes if exported else {}
    policy = attributes.get("leyden.policy", told.model)
    pinned = known.rollout.policy_versions.get(told.model, 0) if known is not None else 0
    version = attributes.get("leyden.policy_version", pinned)
    service = report.resource.get("service.name", "")
    intent = CallIntent(
        call_id=call_id, rollout_id=known.rollout.id if known else None, attempt_id=known.attempt.id if known else None,
        seq=seq, digest=blake2b(call_id.encode(), digest_size=16).hexdigest(), occurrence=0,
        origin="rollout" if known else "live", dialect=DIALECT, alias=told.model[:256], policy=str(policy)[:128],
        policy_version=version if isinstance(version, int) else 0, engine=f"otlp {service}"[:256], stream=False,
        request=told.request(), sampling={"asked": {}, "used": dict(told.sampling)}, started_at=report.started_at,
        live=live,
    )  # fmt: skip
    raw = [RawChoice(index, None, None, said.finish_reason[:32], said.text) for index, said in enumerate(told.choices)]
    tokens = checked(None, raw, told.usage)
    completion = CallCompletion(
        call_id=call_id, status="error" if report.failed else "ok",
        http_status=_status(report) if report.failed else 200,
        response=told.response() if told.choices or not report.failed else {}, provenance=tokens.provenance,
        refusal=tokens.refusal, choices=tokens.choices, usage=told.usage, error=report.message or None,
        latency_ms=max(0.0, report.ended_at - report.started_at) * 1000, ended_at=report.ended_at,
    )  # fmt: skip
    return intent, completion


def _as_call(intent: CallIntent, completion: CallCompletion) -> Call:
    """A call that was just queued, as the next span of the same request must see it."""
    return Call(
        id=intent.call_id, rollout_id=intent.rollout_id, attempt_id=intent.attempt_id, seq=intent.seq,
        dialect=intent.dialect, alias=intent.alias, policy=intent.policy, policy_version=intent.policy_version,
        provenance=completion.provenance, request=intent.request, response=completion.response,
        sampling=intent.sampling, prompt_ids=completion.prompt_ids, choices=completion.choices,
        status=completion.status, delivered=True, refusal=completion.refusal, started_at=intent.started_at,
        latency_ms=completion.latency_ms,
    )  # fmt: skip


def _status(report: Report) -> int:
    """HTTP status of a failed call."""
    for name in ("http.response.status_code", "error.type"):
        told = str(report.attributes.get(name, ""))
        if told.isdecimal() and 400 <= int(told[:4]) <= 599:
            return int(told[:4])
    return FAILED_STATUS


def _source(role: Role, reward: ReportedReward) -> str:
    if role == "attempt":
        return "agent"
    return reward.source if reward.source in SOURCES else "api"


def _span(page: _Page, report: Report, meaning: Meaning, call_id: str | None) -> Span:
    attributes = dict(meaning.attributes) | ({"call": call_id} if call_id is not None else {})
    return Span(
        id=record_id("span", page.known.attempt.id, report), rollout_id=page.known.rollout.id,
        attempt_id=page.known.attempt.id, name=meaning.name, kind=meaning.kind, attributes=attributes,
        started_at=report.started_at, ended_at=report.ended_at or None,
    )  # fmt: skip


def _restored(page: _Page, report: Report) -> Span:
    """A span that Leyden exported, as it was."""
    told = report.attributes
    attributes = told.get("leyden.attributes")
    kind, named = told.get("leyden.kind"), told.get("leyden.span")
    span_id = record_id("span", page.known.attempt.id, report)
    if page.role != "attempt" and named is not None:
        span_id = check_id(named, "leyden.span")
        page.kept[span_id] = report
    return Span(
        id=span_id,
        rollout_id=page.known.rollout.id, attempt_id=page.known.attempt.id, name=report.name[:256],
        kind=kind[:32] if isinstance(kind, str) else "custom",
        attributes=attributes if isinstance(attributes, dict) else {}, started_at=report.started_at,
        ended_at=None if told.get("leyden.open") is True else report.ended_at,
    )  # fmt: skip


async def durable(waiting: Sequence["Future[None]"]) -> None:
    """Wait for every row; one that exists was sent before. Raises StoreError."""
    done = await asyncio.gather(*map(asyncio.wrap_future, waiting), return_exceptions=True)
    for outcome in done:
        if isinstance(outcome, BaseException) and not isinstance(outcome, Conflict):
            raise outcome
