"""From the end of a process to an outcome."""

from typing import Any

import numpy as np
import pytest

from leyden.base.config import RewardsConfig
from leyden.base.records import Attempt, Call, Outcome, Provenance, Rollout, Span, Task, Trace
from leyden.runner.base import Finished
from leyden.runner.outcome import DEFAULTS, Ending, judge, policies


def call(status: str = "ok", http_status: int = 200, error: str | None = None) -> Call:
    fields: dict[str, Any] = {"status": status}
    return Call(
        id="c", rollout_id="r", attempt_id="a", seq=0, dialect="openai_chat", alias="main", policy="main",
        policy_version=0, provenance=Provenance.SERVED, request={}, response=None, sampling={},
        prompt_ids=np.zeros(0, np.int32), choices=(), delivered=True, refusal=None, http_status=http_status,
        error=error, **fields,
    )  # fmt: skip


def ending(finished: Finished, *calls: Call, spans: list[Span] | None = None, answers: bool = True) -> Ending:
    rollout = Rollout(id="r", task=Task(id="t"))
    attempt = Attempt(id="a", rollout_id="r", number=1, started_at=0.0)
    trace = Trace(rollout=rollout, attempt=attempt, calls=calls, spans=spans or [])
    return judge(finished, trace, timeout_s=5.0, gateway_answers=answers)


BAD_ENGINE = call("error", 502, "no connection to the engine")
TOO_LONG = call("error", 400, "context_length_exceeded: the prompt has 900 tokens")
FAILED = Finished(exit_code=1, stderr_tail="Traceback\nValueError: x\n")


@pytest.mark.parametrize(
    ("finished", "calls", "answers", "outcome"),
    [
        (Finished(exit_code=0), [call()], True, Outcome.COMPLETED),
        (FAILED, [call()], True, Outcome.AGENT_ERROR),
        (Finished(exit_code=-11), [call()], True, Outcome.AGENT_ERROR),
        (Finished(exit_code=-15, timed_out=True), [call()], True, Outcome.TIMEOUT),
        (Finished(exit_code=0, timed_out=True), [call()], True, Outcome.TIMEOUT),
        (FAILED, [call(), TOO_LONG], True, Outcome.OVERLONG),
        (FAILED, [TOO_LONG, call()], True, Outcome.AGENT_ERROR),
        (FAILED, [call(), BAD_ENGINE], True, Outcome.INFRA_ERROR),
        (Finished(exit_code=0), [call(), BAD_ENGINE], True, Outcome.INFRA_ERROR),
        (FAILED, [BAD_ENGINE, call()], True, Outcome.AGENT_ERROR),
        (FAILED, [call()], False, Outcome.INFRA_ERROR),
        (Finished(exit_code=0), [call()], False, Outcome.COMPLETED),
        (Finished(exit_code=0), [], False, Outcome.INFRA_ERROR),
        (Finished(exit_code=None, fault="gone"), [call()], True, Outcome.INFRA_ERROR),
        (Finished(exit_code=0), [], True, Outcome.AGENT_ERROR),
    ],
)
def test_the_outcome_follows_from_exit_and_calls(
    finished: Finished, calls: list[Call], answers: bool, outcome: Outcome
) -> None:
    assert ending(finished, *calls, answers=answers).outcome is outcome


def test_the_detail_says_what_happened() -> None:
    assert ending(FAILED, call()).detail == (
        "the harness ended with exit code 1; last line of its standard error: ValueError: x"
    )
    survivors = ending(Finished(exit_code=-9, num_survivors=2), call()).detail
    assert survivors == "the harness was ended by signal 9; 2 processes outlived it and were ended"


def test_a_refused_prompt_that_is_too_long_counts_as_overlong() -> None:
    refusal = Span(
        id="s", rollout_id="r", attempt_id="a", name="gateway_refusal",
        attributes={"type": "context_length_exceeded", "message": "the prompt has 900 tokens"},
    )  # fmt: skip
    assert ending(FAILED, call(), spans=[refusal]).outcome is Outcome.OVERLONG


def test_only_an_attempt_without_calls_is_excluded_whatever_its_policy() -> None:
    assert ending(Finished(exit_code=0)).excluded and not ending(FAILED, call()).excluded


def test_every_outcome_has_a_policy_and_single_ones_can_be_replaced() -> None:
    assert set(DEFAULTS) == set(Outcome)
    table = policies(RewardsConfig(on_failure={"timeout": "retry"}))
    assert table == {**DEFAULTS, Outcome.TIMEOUT: "retry"}
