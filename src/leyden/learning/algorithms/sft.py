"""Credit for imitation: a rollout that is good enough is trained with 1, the others not at all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from leyden.base.records import Drop
from leyden.learning.algorithms.base import Algorithm
from leyden.learning.backends.base import Surrogate


@dataclass(frozen=True, kw_only=True)
class Sft(Algorithm):
    """Credit 1 at or above a reward. Below it, tokens are dropped as `below_threshold` and counted."""

    name: str = "rejection_sft"
    """As the configuration calls it."""
    min_reward: float = -math.inf
    """Lowest reward that is imitated; the default imitates every rollout that has one."""
    surrogate: Surrogate | None = "nll"
    """Likelihood, without importance weight."""
    negative_credit: bool = False
    """Nothing is pushed away from."""
    zero_credit_drop: Drop | None = Drop.BELOW_THRESHOLD
    """Credit 0 means not trained."""

    def credit(self, rewards_G: Sequence[float]) -> list[float]:
        """1.0 or 0.0 for each rollout; the group does not matter."""
        assert all(map(math.isfinite, rewards_G)), rewards_G
        return [1.0 if reward >= self.min_reward else 0.0 for reward in rewards_G]
