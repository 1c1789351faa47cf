"""Log lines of the gateway: one per call at level `info`, with its ids and numbers. Neither keys nor bodies.

What an engine or a client said is a body in other words, so error messages are left to the record of the call, and of
an exception only its class and its stack are written. `set_up` is for the process that serves; a library that embeds
the gateway keeps its own handlers.
"""

import json
import logging
import sys
import time
import traceback
from typing import TYPE_CHECKING, Literal

from leyden.base.records import CallCompletion

if TYPE_CHECKING:
    from leyden.base.errors import RequestRefused
    from leyden.gateway.auth import KnownAttempt
    from leyden.gateway.road import Chosen

log = logging.getLogger("leyden.gateway.calls")

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; the rest was given as `extra`."""


def log_call(chosen: "Chosen", completion: CallCompletion) -> None:
    """One call that is durable."""
    if not log.isEnabledFor(logging.INFO):
        return
    called = chosen.translated.called
    fields = {
        "call_id": completion.call_id,
        "rollout_id": called.known.rollout.id if called.known else None,
        "attempt_id": called.known.attempt.id if called.known else None,
        "service": called.live.service if called.live else None,
        "dialect": chosen.translated.request.dialect,
        "policy": f"{chosen.route.policy}@{chosen.route.version}",
        "engine": chosen.route.endpoint,
        "status": completion.status,
        "http_status": completion.http_status,
        "delivered": completion.delivered,
        "retry_count": completion.retry_count,
        "prompt_tokens": completion.usage.get("prompt_tokens"),
        "completion_tokens": completion.usage.get("completion_tokens"),
        "cost_usd": completion.usage.get("cost_usd"),
        "latency_ms": round(completion.latency_ms, 3),
        "refusal": completion.refusal,
    }
    log.info("call", extra={key: value for key, value in fields.items() if value is not None})


def log_refusal(known: "KnownAttempt | None", refusal: "RequestRefused", request_id: str) -> None:
    """One call that was refused before it was sent."""
    if log.isEnabledFor(logging.INFO):
        attempt_id = known.attempt.id if known is not None else None
        extra = {
            "status": refusal.status, "kind": refusal.kind, "field": refusal.field, "attempt_id": attempt_id,
            "request_id": request_id,
        }  # fmt: skip
        log.info("refused", extra={key: value for key, value in extra.items() if value is not None})


class _Formatter(logging.Formatter):
    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        """Everything that a line shows."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        found: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "logger": record.name,
            "event": record.getMessage(),
        }  # fmt: skip
        found.update({key: value for key, value in vars(record).items() if key not in _OWN})
        if record.exc_info and record.exc_info[0] is not None:
            found["exception"] = record.exc_info[0].__name__
            found["stack"] = "".join(traceback.format_tb(record.exc_info[2]))
        return found


class JsonFormatter(_Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return json.dumps(self.fields(record), default=str)


class TextFormatter(_Formatter):
    """Words for people."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        found = self.fields(record)
        head = f"{found.pop('time')} {str(found.pop('level')).upper()} {found.pop('event')}"
        stack = found.pop("stack", None)
        pairs = " ".join(f"{key}={value}" for key, value in found.items() if key != "logger")
        return f"{head} {pairs}".rstrip() + (f"\n{stack}" if stack else "")


def set_up(kind: Literal["text", "json"], level: str) -> None:
    """Send the lines of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    for name in ("leyden", "uvicorn", "asyncio", "aiohttp"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == "leyden" else logging.WARNING)
