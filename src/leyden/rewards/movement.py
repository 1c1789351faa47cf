"""Which component moved the total between two versions.

The mean total is a sum over components of the mean amount each contributed (weight x clipped value, where its gate is
open), so the difference of two means is, exactly, the sum of the differences of those amounts. Sums are exact in
rational arithmetic and rounded once at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from leyden.base.config import RewardsConfig
from leyden.base.records import Trace
from leyden.rewards.components import Contribution, Explanation, Total

ASIDE = ("human", "canary")
"""Sources of numbers that are no part of the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one component did to the difference of the mean totals."""

    name: str
    """Component."""
    before: float
    """Mean amount it contributed before; 0 where it did not exist."""
    after: float
    """Mean amount after."""
    difference: float
    """Its part of the difference of the totals."""
    open_before: float
    """Share of attempts in which its gate was open."""
    open_after: float
    """Share of attempts in which its gate was open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """A difference of mean totals and its parts."""

    before: float
    """Mean total before."""
    after: float
    """Mean total after."""
    parts: tuple[Moved, ...]
    """Largest movement first; their differences add up to `after - before`."""

    @property
    def difference(self) -> float:
        """What has to be explained."""
        return self.after - self.before

    def text(self) -> str:
        """One line for people: `+0.3 = correct +0.4, tokens -0.1`."""
        parts = ", ".join(f"{part.name} {part.difference:+.4g}" for part in self.parts if part.difference)
        return f"{self.difference:+.4g} = {parts or 'nothing moved'}"


def movement(before: Sequence[Explanation], after: Sequence[Explanation]) -> Movement:
    """Explain the difference of the mean totals of two sets of scored attempts.

    The two may have been made under different weights, gates or schedules (another reward version): then that part
    of the difference is in the amounts too. Raises ValueError when one of them is empty.
    """
    if not before or not after:
        raise ValueError("a movement needs at least one scored attempt on each side")
    names = sorted({part.name for one in (*before, *after) for part in one.parts})
    parts = []
    for name in names:
        then, now = _mean(before, name), _mean(after, name)
        parts.append(
            Moved(
                name=name,
                before=float(then),
                after=float(now),
                difference=float(now - then),
                open_before=_open(before, name),
                open_after=_open(after, name),
            )
        )
    parts.sort(key=lambda part: (-abs(part.difference), part.name))
    totals = [sum((_mean(side, name) for name in names), Fraction(0)) for side in (before, after)]
    return Movement(before=float(totals[0]), after=float(totals[1]), parts=tuple(parts))


def explanations(traces: Sequence[Trace], config: RewardsConfig) -> list[Explanation]:
    """The totals of scored attempts and their parts, under the weights of `config`; attempts without a reward are
    left out. Raises VerifierError when the components do not fit the configuration.
    """
    total = Total(config)
    return [
        total.explain({r.name: r.value for r in trace.rewards if r.call_id is None and r.source not in ASIDE})
        for trace in traces
        if trace.rollout.reward is not None and any(r.source not in ASIDE for r in trace.rewards)
    ]


def _of(one: Explanation, name: str) -> Contribution | None:
    return next((part for part in one.parts if part.name == name), None)


def _mean(side: Sequence[Explanation], name: str) -> Fraction:
    parts = (_of(one, name) for one in side)
    return sum((Fraction(part.amount) for part in parts if part is not None), Fraction(0)) / len(side)


def _open(side: Sequence[Explanation], name: str) -> float:
    parts = [part for one in side if (part := _of(one, name)) is not None]
    return sum(part.open for part in parts) / len(parts) if parts else 0.0
