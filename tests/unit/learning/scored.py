"""Groups as an algorithm sees them, so that a test names only rewards, step rewards and prompts."""

from collections.abc import Sequence

import numpy as np

from leyden.base.records import Outcome
from leyden.learning.algorithms import ScoredCall, ScoredGroup, ScoredRollout
from leyden.traces.assemble import Action

PROMPT = (1, 2)


def action(rollout: str, call: str, *, prompt: Sequence[int] = PROMPT, num_tokens: int = 2) -> Action:
    return Action(
        rollout_id=rollout,
        group_id="g",
        call_id=call,
        choice_index=0,
        order=0,
        prompt_ids=np.asarray(prompt, np.int32),
        completion_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.full(num_tokens, -0.5, np.float32),
        policy_version=0,
        temperature=1.0,
        finish_reason="stop",
        reward=0.0,
        outcome=Outcome.COMPLETED,
        drop=None,
    )


def rollout(
    name: str,
    reward: float,
    steps: Sequence[float] = (),
    *,
    values: Sequence[float | None] = (),
    prompts: Sequence[Sequence[int]] = (),
) -> ScoredRollout:
    """One call per entry of `steps`, which is its reward."""
    return ScoredRollout(
        rollout_id=name,
        reward=reward,
        calls=[
            ScoredCall(
                call_id=f"{name}-{k}",
                reward=step,
                actions=[action(name, f"{name}-{k}", prompt=prompts[k] if prompts else (1, 2, k))],
                value=values[k] if values else None,
            )
            for k, step in enumerate(steps)
        ],
    )


def group(*rollouts: ScoredRollout, name: str = "g") -> ScoredGroup:
    return ScoredGroup(group_id=name, task_id="t", rollouts=rollouts)


def outcomes(rewards: Sequence[float], name: str = "g") -> ScoredGroup:
    """A group of rollouts without calls."""
    return group(*(rollout(f"{name}-{i}", reward) for i, reward in enumerate(rewards)), name=name)
