"""Learning from a teacher on the student's own tokens: the reverse KL divergence, token by token, as credit.

    credit of token t = logp_teacher(t) - logp_sampler(t)

Its mean under the student is -KL(student || teacher), so following it pulls the student to where the teacher puts its
mass. Rewards do not matter, but rollouts without one are still dropped by name. The teacher's log-probs are taken at
the temperature that was sampled with. Source: arXiv 2306.13649 (on-policy, reverse KL).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from leyden.base.records import FloatArray
from leyden.learning.algorithms.base import Algorithm, Award, Need, ScoredCall, ScoredGroup


@dataclass(frozen=True, kw_only=True)
class Distill(Algorithm):
    """Credit per token from a teacher."""

    name: str = "distill"
    """As the configuration calls it."""
    needs: ClassVar[frozenset[Need]] = frozenset({"teacher"})

    def award(self, groups: Sequence[ScoredGroup]) -> list[Award]:
        """One award per rollout: its mean over tokens, and one number per token of each action."""
        awards: list[Award] = []
        for group in groups:
            for rollout in group.rollouts:
                calls = [_gaps(call) for call in rollout.calls]
                known = [gap for gaps in calls for gap in gaps if len(gap)]
                mean = float(np.concatenate(known).astype(np.float64).mean()) if known else 0.0
                awards.append(Award(rollout=mean, calls=calls))
        return awards


def _gaps(call: ScoredCall) -> list[FloatArray]:
    """Teacher less sampler for each action; 0 where the teacher was not asked because the action is dropped."""
    if call.teacher is None:
        return [np.zeros(action.num_tokens, np.float32) for action in call.actions]
    gaps: list[FloatArray] = []
    for heard, action in zip(call.teacher, call.actions, strict=True):
        known = heard if len(heard) else action.logprobs
        gaps.append(np.subtract(known, action.logprobs, dtype=np.float32))
    return gaps
