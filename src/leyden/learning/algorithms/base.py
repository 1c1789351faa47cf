"""The contract of an algorithm: it decides who gets credit and sees nothing but rewards. No torch."""

from collections.abc import Sequence
from typing import Protocol

from leyden.base.records import Drop
from leyden.learning.backends.base import Surrogate


class Algorithm(Protocol):
    """Rewards of one group in, one credit per rollout out."""

    @property
    def name(self) -> str:
        """As the configuration calls it."""

    @property
    def surrogate_default(self) -> Surrogate:
        """Loss per token that its credit is meant for."""

    @property
    def negative_credit(self) -> bool:
        """Whether credit below 0 occurs; a likelihood loss is unbounded there."""

    @property
    def zero_credit_drop(self) -> Drop | None:
        """Set: credit 0 means "not trained", dropped for this reason. None: it is trained with credit 0."""

    def credit(self, rewards_G: Sequence[float]) -> list[float]:
        """Credit of each rollout of one group, in the order given; finite for finite rewards; G >= 1.

        A permutation of the rewards permutes the credit and changes nothing else, not even by rounding.
        """
