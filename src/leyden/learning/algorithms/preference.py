"""Pairs inside a group for DPO: the best with the worst, the second best with the second worst, and so on.

A rollout is in at most one pair, and the two of a pair differ in reward; the rest (the middle, flat groups, a group of
one) is not trained and counted as `unpaired`. Equal rewards are ordered by place, which is that of the ids. The loss
of a pair is in `leyden.learning.backends.embedded.losses`. Source: arXiv 2305.18290.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from leyden.base.records import Drop
from leyden.learning.algorithms.base import Algorithm, Award, ScoredGroup
from leyden.learning.backends.base import Surrogate


@dataclass(frozen=True, kw_only=True)
class Preference(Algorithm):
    """Credit 1 for the better of a pair, -1 for the worse."""

    name: str = "dpo"
    """As the configuration calls it."""
    surrogate: Surrogate | None = "dpo"
    """The preference loss."""
    zero_credit_drop: Drop | None = Drop.UNPAIRED
    """Credit 0 means without a partner."""

    def award(self, groups: Sequence[ScoredGroup]) -> list[Award]:
        """One award per rollout, with the name of its pair."""
        awards: list[Award] = []
        for group in groups:
            mine = [Award(rollout=0.0) for _ in group.rollouts]
            for number, (better, worse) in enumerate(pairs_of(group.rewards)):
                name = f"{group.group_id}/{number}"
                mine[better], mine[worse] = Award(rollout=1.0, pair=name), Award(rollout=-1.0, pair=name)
            awards += mine
        return awards


def pairs_of(rewards_G: Sequence[float]) -> list[tuple[int, int]]:
    """(place of the better, place of the worse) of each pair, the widest difference first."""
    order = sorted(range(len(rewards_G)), key=lambda i: (-rewards_G[i], i))
    pairs = [(order[k], order[-1 - k]) for k in range(len(order) // 2)]
    return [(a, b) for a, b in pairs if rewards_G[a] > rewards_G[b]]
