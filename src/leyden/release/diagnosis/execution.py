"""Failures of execution: what the model produced, or the harness, did not run to its end."""

import re

from leyden.base.records import Outcome
from leyden.release.diagnosis.base import Facts, Rule, shorten

_TRACEBACK = re.compile(r"Traceback \(most recent call last\)|^\w*(Error|Exception): ", re.MULTILINE)


def _component(facts: Facts) -> str | None:
    return facts.low_component("executes", "execution", "runs", "compiles", "builds")


def _crashed(facts: Facts) -> str | None:
    if facts.outcome is not Outcome.AGENT_ERROR:
        return None
    return shorten(facts.trace.attempt.detail or f"exit code {facts.trace.attempt.exit_code}")


def _error_output(facts: Facts) -> str | None:
    lines = facts.trace.attempt.stderr_tail.strip().splitlines()
    if not lines or not _TRACEBACK.search(facts.trace.attempt.stderr_tail):
        return None
    return shorten(f"standard error ends with: {lines[-1]}")


RULES = (
    Rule(name="does_not_run", category="execution", meaning="a component named for running is low", find=_component),
    Rule(name="crashed", category="execution", meaning="the harness failed (outcome agent_error)", find=_crashed),
    Rule(name="error_output", category="execution", meaning="an exception on standard error", find=_error_output),
)
