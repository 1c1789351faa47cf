"""Credit relative to the whole step: REINFORCE++ and its variant with a group baseline.

With d_i = r_i (REINFORCE++) or d_i = r_i - mean of the group of i (with the baseline), over all n rollouts of a step:

    credit_i = (d_i - mean d) / (std d + eps)

Source: arXiv 2501.03262. `std` is the sample standard deviation (n - 1). One rollout alone, or equal d, get 0. With
the baseline a group of one has d = 0 but still counts in n. Float64; sums are exact (fsum): order leaves no rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from leyden.learning.algorithms.base import Algorithm, Award, ScoredGroup


@dataclass(frozen=True, kw_only=True)
class GlobalRelative(Algorithm):
    """Credit is the distance from the mean of the step, in standard deviations of the step."""

    name: str = "reinforce_pp"
    """As the configuration calls it."""
    group_baseline: bool = False
    """Whether the mean of each group is taken away first."""
    eps: float = 1e-6
    """Added to the standard deviation."""
    scope: ClassVar[Literal["group", "step"]] = "step"

    def award(self, groups: Sequence[ScoredGroup]) -> list[Award]:
        """One award per rollout; see the module for the formula."""
        distances: list[float] = []
        for group in groups:
            rewards = group.rewards
            # A flat group has distance exactly 0, whatever its mean rounds to.
            flat = min(rewards) == max(rewards)
            mean = (rewards[0] if flat else math.fsum(rewards) / len(rewards)) if self.group_baseline else 0.0
            distances += [reward - mean for reward in rewards]
        if not distances or min(distances) == max(distances):
            return [Award(rollout=0.0) for _ in distances]
        centre = math.fsum(distances) / len(distances)
        centred = [d - centre for d in distances]
        std = math.sqrt(math.fsum(x * x for x in centred) / (len(centred) - 1))
        return [Award(rollout=x / (std + self.eps)) for x in centred]
