"""`POST /v1/traces`: OTLP over HTTP, in protobuf or JSON, with or without gzip.

It promises what OTLP asks of a server: the answer has the encoding of the request, spans that are refused are counted
and named in `partial_success` while the others are stored, a body that is no OTLP is a 400 that is not sent again, and
a store that cannot be written is a 503 that is. What the spans become is decided in `reported`.
"""

import asyncio
import zlib
from typing import Any, cast

from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from leyden.base.errors import LeydenError, RecordError, RequestRefused
from leyden.gateway.auth import Caller, KnownAttempt
from leyden.gateway.refusals import as_refusal
from leyden.gateway.reported import Ingest, Result
from leyden.gateway.reported_live import LiveIngest, is_live_export
from leyden.gateway.rest import key_of
from leyden.gateway.road import Gateway
from leyden.traces.telemetry.base import Report
from leyden.traces.telemetry.meaning import attempt_named
from leyden.traces.telemetry.wire import Encoding, read_spans

MEDIA: dict[str, Encoding] = {"application/x-protobuf": "protobuf", "application/json": "json"}
"""Content types of OTLP over HTTP."""
MAX_TOLD = 20
"""Reasons in one answer; the number of refused spans is exact."""
CODES = {400: 3, 401: 16, 403: 7, 404: 5, 409: 9, 413: 8, 415: 3, 422: 3, 500: 13, 503: 14}
"""HTTP statuses as the codes of google.rpc.Code."""


def routes(gateway: Gateway) -> list[BaseRoute]:
    """The addresses: an attempt's path, with or without what its model calls have there, and the key alone."""
    ingest, live = Ingest(gateway), LiveIngest(gateway)

    async def run(request: Request) -> Response:
        return await _answer(gateway, ingest, live, request)

    attempt = "/proxy/rollout/{rollout_id}/attempt/{attempt_id}"
    prefixes = [before + after for before in ("", attempt, attempt + "/mode/{mode}") for after in ("", "/openai")]
    return [Route(prefix + "/v1/traces", run, methods=["POST"]) for prefix in prefixes]


async def _answer(gateway: Gateway, ingest: Ingest, live: LiveIngest, request: Request) -> Response:
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = MEDIA.get(media, "json")
    try:
        if media not in MEDIA:
            raise RequestRefused(
                f"the content type is {media!r}; it must be one of {', '.join(MEDIA)}", status=415,
                hint="set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
            )  # fmt: skip
        caller = await gateway.keys.caller(key_of(request))
        known = await _attempt(gateway, caller, request.path_params)
        raw = await _body(gateway, request)
        result = await _record(ingest, live, caller, known, raw, encoding)
    except LeydenError as error:
        refusal = RequestRefused(str(error), status=400) if isinstance(error, RecordError) else as_refusal(error)
        message = str(refusal) + (f" ({refusal.hint})" if refusal.hint else "")
        return _encoded(Status(code=CODES.get(refusal.status, 2), message=message), encoding, refusal.status)
    answer = ExportTraceServiceResponse()
    if result.refused or result.warnings:
        told = [*result.refused, *result.warnings]
        more = f"; and {len(told) - MAX_TOLD} more" if len(told) > MAX_TOLD else ""
        answer.partial_success.rejected_spans = len(result.refused)
        answer.partial_success.error_message = "; ".join(told[:MAX_TOLD]) + more
    return _encoded(answer, encoding, 200)


def _encoded(message: Message, encoding: Encoding, status: int) -> Response:
    if encoding == "protobuf":
        return Response(message.SerializeToString(), status, media_type="application/x-protobuf")
    return Response(json_format.MessageToJson(message, indent=None), status, media_type="application/json")


async def _attempt(gateway: Gateway, caller: Caller, path: dict[str, Any]) -> KnownAttempt | None:
    """The attempt that key and path name; None if spans have to name it. Raises RequestRefused: 403, 404, 409."""
    named = cast(str | None, path.get("rollout_id")), cast(str | None, path.get("attempt_id"))
    known = caller.known
    if caller.role == "service" and named[0] is not None:
        raise RequestRefused(
            "a service key cannot tell of an attempt", status=403, kind="permission_error",
            hint="post to /v1/traces, where a service's spans are live traffic",
        )  # fmt: skip
    if known is None:
        return await gateway.keys.attempt(named[0], named[1]) if named[0] and named[1] else None
    if named[0] is not None and named != (known.rollout.id, known.attempt.id):
        raise RequestRefused(
            f"this key belongs to another attempt than {named[1]} of rollout {named[0]}", status=403,
            kind="permission_error", hint="use the URL and the key of the same environment",
        )  # fmt: skip
    gateway.keys.still_runs(known)
    return known


async def _body(gateway: Gateway, request: Request) -> bytes:
    """The body, decompressed. Raises RequestRefused: 413 for too many bytes before or after, 415, 400."""
    limit = gateway.config.gateway.max_body_bytes
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("gzip", "identity", ""):
        raise RequestRefused(
            f"the content encoding is {coding!r}; it must be gzip or identity", status=415,
            hint="set OTEL_EXPORTER_OTLP_COMPRESSION=gzip",
        )  # fmt: skip
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit, "")
        parts.append(part)
    raw = b"".join(parts)
    return await asyncio.to_thread(_unzip, raw, limit) if coding == "gzip" else raw


def _unzip(raw: bytes, limit: int) -> bytes:
    """What gzip members hold, without ever holding more than the limit: a kilobyte can hold a megabyte."""
    found: list[bytes] = []
    left = limit
    while raw:
        member = zlib.decompressobj(wbits=31)
        try:
            part = member.decompress(raw, left + 1)
        except zlib.error as error:
            raise RequestRefused(f"the body is not gzip: {error}") from None
        left -= len(part)
        if left < 0:
            raise _too_large(limit, " after decompression")
        if not member.eof:
            raise RequestRefused("the body is not gzip: it ends within a member")
        found.append(part)
        raw = member.unused_data
    return b"".join(found)


def _too_large(limit: int, when: str) -> RequestRefused:
    return RequestRefused(
        f"the request has more than {limit} bytes{when}", status=413, kind="request_too_large",
        hint="export smaller batches (OTEL_BSP_MAX_EXPORT_BATCH_SIZE), or raise gateway.max_body_bytes",
    )  # fmt: skip


async def _record(
    ingest: Ingest, live: LiveIngest, caller: Caller, known: KnownAttempt | None, raw: bytes, encoding: Encoding
) -> Result:
    """Store every span for the attempt it belongs to, or as live traffic. Raises RecordError, StoreError."""
    reports, refused = await asyncio.to_thread(read_spans, raw, encoding)
    result = Result(refused=refused)
    if caller.role == "service":
        await live.record(caller, reports, result)
        return result
    if known is not None:
        await ingest.record(caller.role, known, reports, result)
        return result
    by_attempt: dict[tuple[str, str], list[Report]] = {}
    await live.record(caller, [report for report in reports if is_live_export(report)], result)
    for report in reports:
        if is_live_export(report):
            continue
        named = attempt_named(report)
        if named is None:
            reason = "no attempt is named; post to the attempt's path, or set leyden.rollout and leyden.attempt"
            result.refuse(report, reason)
        else:
            by_attempt.setdefault(named, []).append(report)
    for named, group in by_attempt.items():
        try:
            theirs = await ingest.attempt(*named)
        except RequestRefused as error:
            for report in group:
                result.refuse(report, str(error))
        else:
            await ingest.record(caller.role, theirs, group, result)
    return result
