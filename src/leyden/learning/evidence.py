"""What an algorithm wants to know of single calls before it gives credit: step rewards, a critic, a teacher.

Values and teachers are asked about the prompts and tokens of actions that are trained, and of no others: a call that is
dropped has none. No torch; a backend or a teacher does the work, and may take minutes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from leyden.base.config import LearnConfig
from leyden.base.records import FloatArray, Trace
from leyden.learning.algorithms.base import Algorithm
from leyden.learning.batch import ActionKey, Batch, build
from leyden.traces.assemble import Assembly


class Critic(Protocol):
    """A backend that has a value head."""

    def values(self, batch: Batch) -> FloatArray:
        """What is expected from each action's prompt on, shape (A,)."""


class Teacher(Protocol):
    """A model that is not trained and scores tokens."""

    def logprobs(self, batch: Batch) -> FloatArray:
        """Its log-prob of every label, shape (N,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of calls and actions; nothing by default."""

    step_rewards: Mapping[str, float] = field(default_factory=dict)
    """Call to the weighted sum of its own rewards; calls without one are not there."""
    values: Mapping[ActionKey, float] = field(default_factory=dict)
    """What the critic expects."""
    teacher: Mapping[ActionKey, FloatArray] = field(default_factory=dict)
    """Log-probs of the teacher, shapes (R,)."""


def gather(
    traces: Sequence[Trace],
    assembly: Assembly,
    algorithm: Algorithm,
    learn: LearnConfig,
    critic: Critic,
    teacher: Teacher | None = None,
) -> Evidence:
    """All that `algorithm` needs for the actions of `assembly`."""
    values: Mapping[ActionKey, float] = {}
    heard: dict[ActionKey, FloatArray] = {}
    if algorithm.needs:
        probe = _probe(assembly)
        if probe is not None and "values" in algorithm.needs:
            values = dict(zip(probe.keys_A, critic.values(probe).tolist(), strict=True))
        if probe is not None and "teacher" in algorithm.needs:
            assert teacher is not None, "the wiring gives a teacher to every run that needs one"
            logp_N = teacher.logprobs(probe)
            for a, key in enumerate(probe.keys_A):
                heard[key] = logp_N[probe.action_N == a]
    return Evidence(step_rewards=step_rewards(traces, learn.step_reward_weight), values=values, teacher=heard)


def step_rewards(traces: Sequence[Trace], weight: float) -> dict[str, float]:
    """Call to `weight` times the sum of its own rewards, over the calls of the last attempts that have any."""
    found: dict[str, list[float]] = {}
    for trace in traces:
        for reward in trace.rewards:
            if reward.call_id is not None:
                found.setdefault(reward.call_id, []).append(reward.value)
    return {call_id: weight * math.fsum(values) for call_id, values in found.items()}


def _probe(assembly: Assembly) -> Batch | None:
    """Every trained action as one batch without credit; None where there is none."""
    rollouts = {action.rollout_id: 0.0 for action in assembly.actions if action.drop is None}
    batches = build(assembly.actions, rollouts)
    return batches[0] if batches else None
