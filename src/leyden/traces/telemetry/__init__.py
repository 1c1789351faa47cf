"""What instrumented programs report by OTLP, and our traces in the same form. Pure: bytes to records and back.

`read_spans` reads a request, `meaning_of` says what a span of it means, `request_of` writes a trace.
"""

from leyden.traces.telemetry.base import Convention, Report, ReportedCall, ReportedEvent, ReportedReward, Said
from leyden.traces.telemetry.genai import GENAI
from leyden.traces.telemetry.openinference import OPENINFERENCE

CONVENTIONS: tuple[Convention, ...] = (OPENINFERENCE, GENAI)
"""Every convention that is understood; the first that recognises a span reads it."""

__all__ = [
    "CONVENTIONS",
    "Convention",
    "Report",
    "ReportedCall",
    "ReportedEvent",
    "ReportedReward",
    "Said",
]
