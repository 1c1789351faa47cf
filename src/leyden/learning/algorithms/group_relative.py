"""Credit relative to the group: GRPO, Dr. GRPO and RLOO as settings of one class.

With rewards r_1..r_G of one group:

    GRPO      (r_i - mean) / (std + eps)        baseline mean, divide_by_std
    Dr. GRPO   r_i - mean                       baseline mean
    RLOO       r_i - mean of the others         baseline leave_one_out; equals Dr. GRPO times G / (G - 1)

Sources: GRPO arXiv 2402.03300, Dr. GRPO arXiv 2503.20783, RLOO arXiv 2402.14740. `std` is the sample
standard deviation (G - 1), as in the implementations that results are compared with. A group of one or
without variance gets 0: there is nothing to compare. Float64; sums are exact (fsum), so order leaves no
rounding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from leyden.learning.algorithms.base import Algorithm


@dataclass(frozen=True, kw_only=True)
class GroupRelative(Algorithm):
    """Credit is the distance from a baseline made of the group's own rewards."""

    name: str
    """As the configuration calls it."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What each reward is compared with."""
    divide_by_std: bool = False
    """Whether the spread of the group is divided out."""
    eps: float = 1e-6
    """Added to the standard deviation."""

    def credit(self, rewards_G: Sequence[float]) -> list[float]:
        """Credit of each rollout of one group; see the module for the formulas."""
        num = len(rewards_G)
        assert num >= 1 and all(map(math.isfinite, rewards_G)), rewards_G
        if min(rewards_G) == max(rewards_G):
            return [0.0] * num
        mean = math.fsum(rewards_G) / num
        centred_G = [reward - mean for reward in rewards_G]
        scale = num / (num - 1) if self.baseline == "leave_one_out" else 1.0
        if self.divide_by_std:
            std = math.sqrt(math.fsum(x * x for x in centred_G) / (num - 1))
            scale /= std + self.eps
        return [scale * x for x in centred_G]
