"""Bytes and values of OTLP."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from leyden.base.errors import RecordError
from leyden.traces.telemetry.wire import (
    MAX_INT,
    Encoding,
    add_attributes,
    nanoseconds,
    parse_request,
    read_spans,
    seconds,
    to_json,
    to_mapping,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-MAX_INT, MAX_INT - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


def request_with(value: dict[str, Any]) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add(trace_id=b"t" * 16, span_id=b"s" * 8, name="n")
    add_attributes(span.attributes, value)
    return request


@given(st.dictionaries(TEXT, JSON, max_size=4))
def test_every_json_value_comes_back_from_the_attributes_it_was_written_to(value: dict[str, Any]) -> None:
    request = request_with(value)
    attributes: list[KeyValue] = list(request.resource_spans[0].scope_spans[0].spans[0].attributes)
    assert to_mapping(attributes) == value
    assert parse_request(to_json(request), "json") == request
    assert parse_request(request.SerializeToString(), "protobuf") == request


@given(st.floats(min_value=0, max_value=4e9))
def test_a_time_comes_back_as_the_nearest_nanosecond_and_a_time_of_today_exactly(time_s: float) -> None:
    assert abs(seconds(nanoseconds(time_s)) - time_s) <= 1e-9
    if time_s > 1e8:
        assert seconds(nanoseconds(time_s)) == time_s


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("encoding", ["protobuf", "json"])
def test_a_number_that_json_does_not_have_refuses_its_span(number: float, encoding: Any) -> None:
    request = request_with({"deep": [{"x": number}]})
    raw = request.SerializeToString() if encoding == "protobuf" else to_json(request)
    reports, refused = read_spans(raw, encoding)
    assert reports == [] and len(refused) == 1 and "'n'" in refused[0]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_named_error(raw: bytes) -> None:
    encodings: tuple[Encoding, ...] = ("protobuf", "json")
    for encoding in encodings:
        try:
            reports, refused = read_spans(raw, encoding)
        except RecordError as error:
            assert "the body is not" in str(error)
        else:
            assert all(len(report.trace_id) == 32 for report in reports) and all(refused)


def test_what_a_newer_sender_adds_is_ignored() -> None:
    raw = b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"' + b"1" * 32 + b'","spanId":"' + b"2" * 16
    raw += (
        b'","name":"n","new":{"x":1},"attributes":[{"key":"k","value":{"intValue":"9007199254740993"}}]}]}],"more":1}]}'
    )
    [report], refused = read_spans(raw, "json")
    assert refused == [] and report.attributes == {"k": 9007199254740993} and report.trace_id == "1" * 32


def test_spans_come_in_the_order_of_their_start() -> None:
    request = request_with({})
    spans = request.resource_spans[0].scope_spans[0].spans
    for number, start_ns in enumerate((5, 3, 4)):
        spans.add(
            trace_id=b"t" * 16, span_id=bytes([number + 1]) * 8, name=str(start_ns), start_time_unix_nano=start_ns
        )
    assert [report.name for report in read_spans(request.SerializeToString(), "protobuf")[0]] == ["n", "3", "4", "5"]
