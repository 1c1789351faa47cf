"""OTLP requests as bytes (protobuf or JSON) to reports, and values to the attributes of spans.

A span without valid ids is refused by name and the others are read: that is what OTLP calls a partial success. Times
are whole nanoseconds on the wire and seconds here; a time that came from a float comes back as the same float.
"""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import orjson
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from leyden.base.errors import RecordError
from leyden.traces.telemetry.base import Report, ReportedEvent

Encoding = Literal["protobuf", "json"]

MAX_SPANS = 10_000
"""Spans of one request. Exporters send 512 at most by default; a few bytes make a span, so a limit on bytes alone would
let one request make millions of records."""
KINDS = ("unspecified", "internal", "server", "client", "producer", "consumer")
"""Kinds of a span by their number."""
MAX_INT = 2**63
"""Whole numbers of attributes are below it."""
_FAULTS = (DecodeError, json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError)
"""What the parsers raise for bytes that are no request."""
_HEX_IDS = frozenset({"traceId", "spanId", "parentSpanId"})
"""OTLP's JSON writes these in hexadecimal, where JSON of protobuf has base64."""


def parse_request(raw: bytes, encoding: Encoding) -> ExportTraceServiceRequest:
    """A request from its bytes. RecordError if they are none."""
    request = ExportTraceServiceRequest()
    try:
        if encoding == "protobuf":
            request.ParseFromString(raw)
        else:
            json_format.ParseDict(_with_base64(orjson.loads(raw)), request, ignore_unknown_fields=True)
    except _FAULTS as error:
        what = "an ExportTraceServiceRequest in protobuf" if encoding == "protobuf" else "OTLP in JSON"
        raise RecordError(f"the body is not {what}: {str(error)[:300]}") from None
    return request


def _with_base64(value: Any) -> Any:
    """JSON with ids in base64, as the parser wants them. ValueError for what is not hexadecimal."""
    if isinstance(value, dict):
        return {
            key: base64.b64encode(bytes.fromhex(item)).decode()
            if key in _HEX_IDS and isinstance(item, str)
            else _with_base64(item)
            for key, item in value.items()
        }
    return [_with_base64(item) for item in value] if isinstance(value, list) else value


def to_json(request: ExportTraceServiceRequest) -> bytes:
    """A request as one line of OTLP's JSON."""
    return orjson.dumps(_with_hex(json_format.MessageToDict(request, use_integers_for_enums=True)))


def _with_hex(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: base64.b64decode(item).hex() if key in _HEX_IDS and isinstance(item, str) else _with_hex(item)
            for key, item in value.items()
        }
    return [_with_hex(item) for item in value] if isinstance(value, list) else value


def read_spans(raw: bytes, encoding: Encoding) -> tuple[list[Report], list[str]]:
    """(the spans of a request in the order of their start, why others are refused).

    Raises RecordError if the bytes are no request, or one with more than MAX_SPANS spans.
    """
    request = parse_request(raw, encoding)
    number = sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
    if number > MAX_SPANS:
        raise RecordError(f"the request has {number} spans; at most {MAX_SPANS} are taken at once, send several")
    reports: list[Report] = []
    refused: list[str] = []
    for resource in request.resource_spans:
        about = to_mapping(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                fault = _fault(span)
                report = None if fault else _report(span, about, scope.scope.name)
                if report is None or not _is_finite([report.attributes, about, [e.attributes for e in report.events]]):
                    fault = fault or "an attribute is NaN or infinite; send a finite number, or leave it out"
                    refused.append(f"span {span.name[:80]!r} ({span.span_id.hex()}): {fault}")
                else:
                    reports.append(report)
    return sorted(reports, key=lambda report: report.started_at), refused


def _fault(span: WireSpan) -> str | None:
    if len(span.trace_id) != 16 or not any(span.trace_id):
        return f"its trace id has {len(span.trace_id)} bytes or is zero; it must have 16 and not be zero"
    if len(span.span_id) != 8 or not any(span.span_id):
        return f"its span id has {len(span.span_id)} bytes or is zero; it must have 8 and not be zero"
    return None


def _is_finite(value: Any) -> bool:
    """Whether every number is one that JSON has."""
    if isinstance(value, float):
        return math.isfinite(value)
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return all(map(_is_finite, items))


def _report(span: WireSpan, resource: Mapping[str, Any], scope: str) -> Report:
    return Report(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=KINDS[span.kind] if 0 <= span.kind < len(KINDS) else "unspecified",
        started_at=seconds(span.start_time_unix_nano),
        ended_at=seconds(span.end_time_unix_nano),
        attributes=to_mapping(span.attributes),
        events=[
            ReportedEvent(name=event.name, at=seconds(event.time_unix_nano), attributes=to_mapping(event.attributes))
            for event in span.events
        ],
        links=[
            {"trace_id": link.trace_id.hex(), "span_id": link.span_id.hex(), "attributes": to_mapping(link.attributes)}
            for link in span.links
        ],
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        message=span.status.message,
        resource=resource,
        scope=scope,
    )


def seconds(time_ns: int) -> float:
    """Nanoseconds as seconds; dividing whole numbers gives the nearest float."""
    return time_ns / 10**9


def nanoseconds(time_s: float) -> int:
    """Seconds as nanoseconds, exactly: a product of floats would be rounded to 256 ns in our century."""
    numerator, denominator = float(time_s).as_integer_ratio()
    return max(0, (numerator * 10**9 + denominator // 2) // denominator)


def to_mapping(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes as JSON."""
    return {attribute.key: _to_json(attribute.value) for attribute in attributes}


def _to_json(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_to_json(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return to_mapping(value.kvlist_value.values)
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    return None if kind is None else getattr(value, kind)


def add_attributes(target: Any, attributes: Mapping[str, Any]) -> None:
    """Add JSON to a repeated field of attributes. Whole numbers beyond 64 bits are written as text."""
    for key, value in attributes.items():
        _write(target.add(key=key).value, value)


def _write(target: AnyValue, value: Any) -> None:
    if isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int) and -MAX_INT <= value < MAX_INT:
        target.int_value = value
    elif isinstance(value, float):
        target.double_value = value
    elif isinstance(value, Mapping):
        target.kvlist_value.SetInParent()
        add_attributes(target.kvlist_value.values, {str(key): item for key, item in value.items()})
    elif isinstance(value, Sequence) and not isinstance(value, str):
        target.array_value.SetInParent()
        for item in value:
            _write(target.array_value.values.add(), item)
    elif value is not None:
        # Half a surrogate pair (a text cut inside a character) has no place in protobuf.
        target.string_value = str(value).encode("utf-8", "backslashreplace").decode()
