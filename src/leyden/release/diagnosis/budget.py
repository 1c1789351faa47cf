"""Failures by a limit: of time, of context, of tokens of an answer."""

from leyden.base.records import Outcome
from leyden.release.diagnosis.base import Facts, Rule, shorten


def _time(facts: Facts) -> str | None:
    return shorten(facts.trace.attempt.detail or "time limit") if facts.outcome is Outcome.TIMEOUT else None


def _context(facts: Facts) -> str | None:
    return shorten(facts.trace.attempt.detail or "context limit") if facts.outcome is Outcome.OVERLONG else None


def _cut_off(facts: Facts) -> str | None:
    if facts.finish_reason not in ("length", "max_tokens"):
        return None
    sampled = facts.trace.calls[-1].num_sampled
    return f"the last answer was cut off after {sampled} tokens"


RULES = (
    Rule(name="time", category="budget", meaning="the harness ran into its time limit", find=_time),
    Rule(name="context", category="budget", meaning="a prompt was longer than the context", find=_context),
    Rule(name="cut_off", category="budget", meaning="the last answer ended at its token limit", find=_cut_off),
)
