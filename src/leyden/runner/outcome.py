"""How an attempt ended, and what is done about it.

| outcome | default policy |
|---|---|
| `completed` | train: the verifier's reward; no verifier's word means no reward, not 0 |
| `agent_error` | train: the verifier's reward if it gives one, else 0 |
| `timeout`, `overlong` | zero: reward 0, the verifier is not asked |
| `env_error`, `infra_error` | retry, then exclude: never a reward |
| `cancelled` | exclude |

`rewards.on_failure` replaces single rows. An attempt that never called the model is excluded whatever its
outcome: there is nothing to train, and a reward of 0 would punish the other members of its group for a
set-up fault.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from leyden.base.config import RewardsConfig
from leyden.base.errors import ConfigError
from leyden.base.records import Call, Outcome, Trace
from leyden.runner.base import Finished

Policy = Literal["train", "zero", "retry", "exclude"]

DEFAULTS: Mapping[Outcome, Policy] = {
    Outcome.COMPLETED: "train",
    Outcome.AGENT_ERROR: "train",
    Outcome.TIMEOUT: "zero",
    Outcome.OVERLONG: "zero",
    Outcome.ENV_ERROR: "retry",
    Outcome.INFRA_ERROR: "retry",
    Outcome.CANCELLED: "exclude",
}
REFUSAL_SPAN = "gateway_refusal"
"""Name of the span that the gateway records for a call that it refused before any engine saw it."""
_NO_CONNECTION = (
    "connection refused",
    "connecterror",
    "apiconnectionerror",
    "connection error",
    "econnrefused",
    "name or service not known",
    "name resolution",
    "getaddrinfo",
    "no route to host",
    "network is unreachable",
)
_NO_IMPORT = ("modulenotfounderror", "importerror", "cannot find module")
_OVERLONG = ("context_length_exceeded", "context length", "maximum context", "max_context", "prompt too long")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is known about the end of an attempt."""

    outcome: Outcome
    """How it ended."""
    detail: str
    """What happened, for people."""
    diagnosis: str | None = None
    """Short name of a likely set-up fault."""
    excluded: bool = False
    """Whether it is excluded whatever the policy of its outcome."""


def policies(rewards: RewardsConfig) -> Mapping[Outcome, Policy]:
    """The table with `rewards.on_failure` applied. Raises ConfigError for an unknown outcome."""
    table = dict(DEFAULTS)
    for name, policy in rewards.on_failure.items():
        try:
            table[Outcome(name)] = policy
        except ValueError:
            known = ", ".join(outcome.value for outcome in Outcome)
            raise ConfigError(f"rewards.on_failure.{name}: there is no such outcome; there are: {known}") from None
    return table


def judge(finished: Finished, trace: Trace, *, timeout_s: float, gateway_answers: bool) -> Ending:
    """The outcome of an attempt from how its process ended and what it called.

    `gateway_answers` says whether the gateway accepts connections now; when it does not, the harness is not
    to blame for a failure.
    """
    if finished.fault:
        detail = f"the harness was lost: {finished.fault}"
        return Ending(outcome=Outcome.INFRA_ERROR, detail=detail, diagnosis="launcher_failed")
    how = _how(finished, timeout_s)
    broken = _infrastructure(finished, trace, gateway_answers)
    if broken is not None:
        diagnosis, why = broken
        return Ending(outcome=Outcome.INFRA_ERROR, detail=f"{how}; {why}", diagnosis=diagnosis)
    outcome = _outcome(finished)
    if not trace.calls:
        diagnosis, cause = _no_calls(finished, trace)
        if outcome is Outcome.COMPLETED:
            outcome = Outcome.AGENT_ERROR
        detail = f"no model call was captured: {cause} ({how})"
        return Ending(outcome=outcome, detail=detail, diagnosis=diagnosis, excluded=True)
    if outcome is Outcome.AGENT_ERROR and _is_overlong(trace):
        return Ending(outcome=Outcome.OVERLONG, detail=f"{how} after a prompt longer than the policy's context")
    return Ending(outcome=outcome, detail=how)


def _how(finished: Finished, timeout_s: float) -> str:
    if finished.timed_out:
        how = f"the harness was ended after its time limit of {timeout_s:g} s"
    elif finished.exit_code is not None and finished.exit_code < 0:
        how = f"the harness was ended by signal {-finished.exit_code}"
    else:
        how = f"the harness ended with exit code {finished.exit_code}"
    last = finished.stderr_tail.strip().splitlines()[-1:]
    if last and finished.exit_code != 0:
        how += f"; last line of its standard error: {last[0][:300]}"
    if finished.num_survivors:
        how += f"; {finished.num_survivors} processes outlived it and were ended"
    return how


def _outcome(finished: Finished) -> Outcome:
    if finished.timed_out:
        return Outcome.TIMEOUT
    return Outcome.COMPLETED if finished.exit_code == 0 else Outcome.AGENT_ERROR


def _infrastructure(finished: Finished, trace: Trace, gateway_answers: bool) -> tuple[str, str] | None:
    """(diagnosis, why) when the engine or the gateway is to blame."""
    last: Call | None = trace.calls[-1] if trace.calls else None
    if last is not None and last.status == "error" and last.http_status >= 500:
        why = last.error or "the engine gave no reason"
        return "engine_failed", f"its last call failed with {last.http_status}: {why}"
    if not gateway_answers and (finished.exit_code != 0 or last is None):
        return "gateway_down", "the gateway does not answer"
    return None


def _is_overlong(trace: Trace) -> bool:
    texts = [str(dict(span.attributes)) for span in trace.spans if span.name == REFUSAL_SPAN]
    last = trace.calls[-1]
    if last.status == "error" and 400 <= last.http_status < 500:
        texts.append(f"{last.error} {last.response}")
    return any(sign in text.lower() for text in texts for sign in _OVERLONG)


def _no_calls(finished: Finished, trace: Trace) -> tuple[str, str]:
    """(diagnosis, likely cause) of an attempt without calls."""
    refused = [span for span in trace.spans if span.name == REFUSAL_SPAN]
    if refused:
        what = refused[-1].attributes.get("message") or dict(refused[-1].attributes)
        return "calls_refused", f"the gateway refused {len(refused)} calls, the last one so: {what}"
    output = (finished.stderr_tail + finished.stdout_tail).lower()
    if any(sign in output for sign in _NO_IMPORT):
        return (
            "missing_import",
            "a module that the harness imports is not installed for the interpreter that runs it",
        )
    if any(sign in output for sign in _NO_CONNECTION):
        return "wrong_url", (
            "the harness could not connect, but the gateway answers, so it calls another address: "
            "let it take its base URL from OPENAI_BASE_URL (or ANTHROPIC_BASE_URL), "
            "not from its code or configuration"
        )
    if finished.timed_out:
        return "no_calls", "it ran into its time limit before its first call: it waits for something else"
    if finished.exit_code != 0:
        return "no_calls", "it failed before its first call"
    return "no_calls", (
        "it ended as if all were well, so it either never calls the model or ignores OPENAI_BASE_URL and "
        "ANTHROPIC_BASE_URL and called somebody else"
    )
