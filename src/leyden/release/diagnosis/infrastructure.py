"""Failures of engine, gateway, runner or verifier: they say nothing about the policy."""

from leyden.base.records import Outcome
from leyden.release.diagnosis.base import Facts, Rule, shorten

_BROKEN = (Outcome.INFRA_ERROR, Outcome.ENV_ERROR, Outcome.CANCELLED)


def _outcome(facts: Facts) -> str | None:
    if facts.outcome not in _BROKEN:
        return None
    return shorten(f"outcome {facts.outcome}: {facts.trace.attempt.detail or 'no detail'}")


def _set_up(facts: Facts) -> str | None:
    attempt = facts.trace.attempt
    return shorten(f"{attempt.diagnosis}: {attempt.detail}") if attempt.diagnosis else None


def _engine(facts: Facts) -> str | None:
    last = facts.trace.calls[-1] if facts.trace.calls else None
    if last is None or last.status not in ("error", "open") or 400 <= last.http_status < 500:
        return None
    return shorten(f"the last call ended as {last.status}, {last.http_status}: {last.error or 'no reason given'}")


RULES = (
    Rule(name="broken", category="infrastructure", meaning="engine, environment or runner failed", find=_outcome),
    Rule(name="set_up", category="infrastructure", meaning="a fault of the set-up was diagnosed", find=_set_up),
    Rule(name="engine", category="infrastructure", meaning="the last model call failed", find=_engine),
)
