"""What a client is told when a call cannot be honoured, and the note of it for the runner's diagnosis."""

import time

from leyden.base.errors import EngineError, EngineIncapable, LeydenError, RequestRefused, StoreError
from leyden.base.records import Span, new_id
from leyden.gateway.auth import MAX_REFUSALS, KnownAttempt
from leyden.gateway.client_headers import of_refusal
from leyden.gateway.journal import log_refusal
from leyden.gateway.road import Arrival, Called, Gateway
from leyden.traces.recorder import Recorder


async def refuse(gateway: Gateway, arrival: Arrival, called: Called | None, error: LeydenError) -> None:
    """Answer an error in the shape of the dialect, and note it for the runner's diagnosis."""
    refusal = as_refusal(error)
    gateway.metrics.refused(refusal.kind)
    request_id, headers = of_refusal(arrival.address.dialect, refusal)
    log_refusal(called.known if called else None, refusal, request_id)
    if called is not None:
        note_refusal(gateway.recorder, called.known, arrival.address.path, refusal)
    if arrival.client.started:
        return
    body = arrival.address.dialect.error_body(str(refusal), refusal.kind, refusal.field, refusal.hint)
    await arrival.client.json(refusal.status, body, headers)


def as_refusal(error: LeydenError) -> RequestRefused:
    """An error as what a client is told."""
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, StoreError):
        return RequestRefused(
            f"the call cannot be recorded, so it is not answered: {error}", status=503, kind="store",
            hint="make the store writable again; nothing was half-written",
        )  # fmt: skip
    if isinstance(error, EngineIncapable):
        return RequestRefused(str(error), status=502, kind="engine_incapable")
    if isinstance(error, EngineError):
        return RequestRefused(str(error), status=502, kind="engine_unreachable")
    return RequestRefused(str(error), status=500, kind=type(error).__name__)


def note_refusal(recorder: Recorder, known: KnownAttempt | None, path: str, error: RequestRefused) -> None:
    """Record that a call of a running attempt was refused, so that its run can say why nothing was captured.

    Bounded per attempt. What is no fault of the harness (a full disk, an aborted call) is not noted.
    """
    if known is None or known.num_refusals >= MAX_REFUSALS or known.attempt.ended_at is not None:
        return
    if error.kind in ("store", "aborted"):
        return
    known.num_refusals += 1
    now = time.time()
    span = Span(
        id=new_id("span"),
        rollout_id=known.rollout.id,
        attempt_id=known.attempt.id,
        name="gateway_refusal",
        kind="event",
        attributes={
            "path": path[:200],
            "status": error.status,
            "type": error.kind,
            "field": error.field,
            "message": str(error)[:1000],
        },
        started_at=now,
        ended_at=now,
    )
    recorder.span(span)
