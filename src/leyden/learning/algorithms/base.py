"""The contract of an algorithm: it decides who gets credit, and sees rewards and calls, never weights. No torch.

An algorithm overrides one of two methods: `credit`, when the rewards of one group are all it needs and every call of
a rollout gets the same, or `award`, when it compares across groups, tells calls apart, or wants a critic, a teacher
or pairs. Everything handed to it is read only.

    G   rollouts of one group   R   completion tokens of an action
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from leyden.base.records import Drop, FloatArray, IntArray
from leyden.learning.backends.base import Surrogate
from leyden.traces.assemble import Action

Need = Literal["values", "teacher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredCall:
    """One call of a rollout to the policy that is trained, dropped ones included."""

    call_id: str
    """Which call."""
    reward: float
    """Of this call and of calls after it that the policy had no part in; 0 where nobody gave one."""
    actions: Sequence[Action]
    """Its sampled choices, at least one."""
    value: float | None = None
    """What the critic expects from here on; None where it was not asked or could not read the prompt."""
    teacher: Sequence[FloatArray] | None = None
    """Log-probs that a teacher gives to the tokens of each action, shapes (R,); None where it was not asked."""

    @property
    def prompt_ids(self) -> IntArray:
        """What the engine read."""
        return self.actions[0].prompt_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRollout:
    """One member of a group."""

    rollout_id: str
    """Whose."""
    reward: float
    """How it ended, finite."""
    calls: Sequence[ScoredCall]
    """In order of time; empty where it made none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """Rollouts of one task that are compared, at least one."""

    group_id: str
    """Which group."""
    task_id: str
    """What was asked."""
    rollouts: Sequence[ScoredRollout]
    """In the order of their ids."""

    @property
    def rewards(self) -> list[float]:
        """Of its rollouts, in their order."""
        return [rollout.reward for rollout in self.rollouts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Award:
    """What one rollout is given."""

    rollout: float
    """Credit of the rollout; of each of its calls too, unless `calls` says otherwise."""
    calls: Sequence[float | Sequence[FloatArray]] | None = None
    """Credit of each call: one number, or for each of its actions one number per token, shapes (R,)."""
    targets: Sequence[float] | None = None
    """What the critic should have expected at each call; NaN where it learns nothing."""
    pair: str = ""
    """Rollouts with the same name here are a pair: one with credit 1, the other with credit -1."""


class Algorithm:
    """Base of every algorithm; one of your own overrides `credit` or `award` and takes a `LearnConfig`."""

    name: str = ""
    """As the configuration calls it."""
    surrogate: Surrogate | None = None
    """The loss per token that its credit is meant for; None: the configured one."""
    negative_credit: bool = True
    """Whether credit below 0 occurs; a likelihood loss is unbounded there."""
    zero_credit_drop: Drop | None = None
    """Set: credit 0 means "not trained", dropped for this reason. None: it is trained with credit 0."""
    scope: ClassVar[Literal["group", "step"]] = "group"
    """Whether the credit of a group follows from that group, or from all groups of the step."""
    needs: ClassVar[frozenset[Need]] = frozenset()
    """What must be known of each call before credit can be given."""
    settings: ClassVar[frozenset[str]] = frozenset()
    """Keys of `leyden.base.recipes.SPECIFIC` that one of your own reads; another one that is set is refused."""

    def credit(self, rewards_G: Sequence[float]) -> list[float]:
        """Credit of each rollout of one group, in the order given; finite for finite rewards; G >= 1.

        A permutation of the rewards permutes the credit and changes nothing else, not even by rounding.
        """
        raise NotImplementedError(f"{type(self).__name__} overrides neither credit() nor award()")

    def award(self, groups: Sequence[ScoredGroup]) -> list[Award]:
        """One award for each rollout of each group, in the order given: all that one step compares."""
        return [Award(rollout=credit) for group in groups for credit in self.credit(group.rewards)]
