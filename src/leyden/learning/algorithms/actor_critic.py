"""Credit by a critic: generalised advantage estimation over the calls of a rollout, in order of time.

A time step is a call, whatever rows its tokens end up in: with V_k the critic's value of the prompt of call k, s_k its
reward and r the reward of the rollout, which follows the last call,

    delta_k = s_k + gamma * V_{k+1} - V_k        (V after the last call is 0, and r is added to its s)
    A_k = delta_k + gamma * lambda * A_{k+1}     target_k = A_k + V_k

Source: arXiv 1506.02438, equations 11 and 16. Calls without a value (dropped: the critic never read them) are no time
step of their own: their reward counts for the call before. They get the credit of the rollout, r - V_0, as does a
rollout without calls (then V_0 is 0); neither is trained. Choices of one call share its value and credit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leyden.learning.algorithms.base import Algorithm, Award, Need, ScoredGroup, ScoredRollout


@dataclass(frozen=True, kw_only=True)
class ActorCritic(Algorithm):
    """PPO's credit. Nothing is compared: a group of one is as good as another."""

    name: str = "ppo"
    """As the configuration calls it."""
    gamma: float = 1.0
    """Discount from call to call."""
    gae_lambda: float = 0.95
    """0 trusts the critic, 1 the returns."""
    needs: ClassVar[frozenset[Need]] = frozenset({"values"})

    def award(self, groups: Sequence[ScoredGroup]) -> list[Award]:
        """One award per rollout; see the module for the formulas."""
        return [self._one(rollout) for group in groups for rollout in group.rollouts]

    def _one(self, rollout: ScoredRollout) -> Award:
        valued = [k for k, call in enumerate(rollout.calls) if call.value is not None]
        values = [float(rollout.calls[k].value or 0.0) for k in valued]
        rewards = [0.0] * len(valued)
        for place, k in enumerate(valued):
            following = valued[place + 1] if place + 1 < len(valued) else len(rollout.calls)
            rewards[place] = math.fsum(call.reward for call in rollout.calls[k:following])
        given = rollout.reward - (values[0] if values else 0.0)
        calls = [given] * len(rollout.calls)
        targets = [math.nan] * len(rollout.calls)
        for k, credit, value in zip(valued, self.gae(rewards, values, rollout.reward), values, strict=True):
            calls[k], targets[k] = credit, credit + value
        return Award(rollout=given, calls=calls, targets=targets)

    def gae(self, rewards_K: Sequence[float], values_K: Sequence[float], last: float) -> list[float]:
        """Advantage of each call, shape (K,)."""
        found: list[float] = []
        advantage = value = 0.0
        for k in range(len(rewards_K) - 1, -1, -1):
            own = rewards_K[k] + (last if k == len(rewards_K) - 1 else 0.0)
            advantage = own + self.gamma * value - values_K[k] + self.gamma * self.gae_lambda * advantage
            value = values_K[k]
            found.append(advantage)
        return found[::-1]
