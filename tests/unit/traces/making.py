"""Records with everything in place, so that a test names only what it is about."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from leyden.base.records import (
    Attempt,
    Call,
    Choice,
    IntArray,
    Mode,
    Outcome,
    Provenance,
    Rollout,
    Split,
    Task,
    Trace,
)
from leyden.traces.assemble import OutcomePolicy

OUTCOMES: Mapping[Outcome, OutcomePolicy] = {
    Outcome.COMPLETED: "train",
    Outcome.AGENT_ERROR: "zero",
    Outcome.TIMEOUT: "zero",
    Outcome.OVERLONG: "zero",
    Outcome.ENV_ERROR: "exclude",
    Outcome.INFRA_ERROR: "exclude",
    Outcome.CANCELLED: "exclude",
}


def ids(*values: int) -> IntArray:
    return np.asarray(values, np.int32)


def make_choice(completion: Sequence[int] = (7, 8), index: int = 0) -> Choice:
    return Choice(
        index=index,
        completion_ids=np.asarray(completion, np.int32),
        logprobs=np.full(len(completion), -0.5, np.float32),
        finish_reason="stop",
    )


def make_call(
    call_id: str,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    completions: Sequence[Sequence[int]] = ((7, 8),),
    seq: int = 0,
    policy: str = "main",
    policy_version: int = 0,
    provenance: Provenance = Provenance.SERVED,
    sampling: Mapping[str, Any] | None = None,
    status: Literal["ok", "error", "aborted", "open"] = "ok",
    delivered: bool = True,
    refusal: str | None = None,
    request: Mapping[str, Any] | None = None,
    response: Mapping[str, Any] | None = None,
) -> Call:
    return Call(
        id=call_id,
        rollout_id="r0",
        attempt_id="r0-attempt",
        seq=seq,
        dialect="openai_chat",
        alias=policy,
        policy=policy,
        policy_version=policy_version,
        provenance=provenance,
        request=request or {},
        response=response or {},
        sampling={"asked": {}, "used": {"temperature": 1.0} if sampling is None else sampling},
        prompt_ids=np.asarray(prompt, np.int32),
        choices=[make_choice(completion, index) for index, completion in enumerate(completions)],
        status=status,
        delivered=delivered,
        refusal=refusal,
    )


def make_trace(
    rollout_id: str = "r0",
    *,
    calls: Sequence[Call] = (),
    reward: float | None = 1.0,
    outcome: Outcome | None = Outcome.COMPLETED,
    group_id: str | None = "g0",
    task_id: str = "t0",
    mode: Mode = "train",
    split: Split = "train",
) -> Trace:
    attempt_id = f"{rollout_id}-attempt"
    return Trace(
        rollout=Rollout(
            id=rollout_id,
            task=Task(id=task_id, split=split),
            mode=mode,
            group_id=group_id,
            outcome=outcome,
            reward=reward,
        ),
        attempt=Attempt(id=attempt_id, rollout_id=rollout_id, number=1, started_at=0.0, outcome=outcome),
        calls=[replace(call, rollout_id=rollout_id, attempt_id=attempt_id) for call in calls],
    )
