"""Calls of live traffic as OTLP: one trace per session, one span per call, as calls of an attempt are written.

A session has no span of its own, so its calls have no parent. Who is behind a call is written by the attributes of the
semantic conventions where there are any.
"""

from collections.abc import Iterable

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import leyden
from leyden.base.records import Call
from leyden.traces.telemetry.meaning import EXPORT_SCOPE, RECORD
from leyden.traces.telemetry.wire import add_attributes, nanoseconds
from leyden.traces.telemetry.writing import digest, write_call

SERVICE = "leyden.service"
"""Name of the service key that a live call came with."""
SESSIONS = ("session.id", "gen_ai.conversation.id")
"""Attributes that name the session; the first is written."""
SUBJECTS = ("user.id", "enduser.pseudo.id", "enduser.id")
"""Attributes that name the person; the first is written."""
PURPOSE = "leyden.purpose"
"""What a live call may be used for."""


def live_request_of(calls: Iterable[Call]) -> ExportTraceServiceRequest:
    """Live calls as one request."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    add_attributes(resource.resource.attributes, {"service.name": "leyden", "service.version": leyden.__version__})
    scope = resource.scope_spans.add()
    scope.scope.name, scope.scope.version = EXPORT_SCOPE, leyden.__version__
    for call in calls:
        assert call.live is not None, "a call of an attempt is exported with its trace"
        origin = call.live
        together = f"session {origin.service} {origin.session}" if origin.session is not None else f"call {call.id}"
        wire = scope.spans.add(trace_id=digest(together, 16), span_id=digest(call.id, 8), name=f"chat {call.alias}")
        wire.start_time_unix_nano = nanoseconds(call.started_at)
        wire.end_time_unix_nano = nanoseconds(call.started_at + call.latency_ms / 1000)
        told = {
            RECORD: "call", SERVICE: origin.service, SESSIONS[0]: origin.session, SUBJECTS[0]: origin.subject,
            PURPOSE: origin.purpose,
        }  # fmt: skip
        add_attributes(wire.attributes, {key: value for key, value in told.items() if value is not None})
        write_call(wire, call)
    return request
