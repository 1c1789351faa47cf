"""What a holdout of a given size can show, before it is run: exact power, tasks needed, effect that is found.

Promises: power is that of the exact McNemar test that the gate uses, not of an approximation to it; functions
are deterministic. Does not know how often two policies will disagree: that share is asked for, or a few are shown.

Letters of shapes: M = number of tasks on which two policies disagree, from 0 to the number of tasks.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from leyden.base.errors import RecordError

MAX_TASKS = 20_000
"""Largest holdout that `needed_tasks` looks at; an effect that needs more is out of reach of any agent's tests."""

SHARES = (0.1, 0.2, 0.3, 0.5)
"""Shares of disagreement that a plan shows when nothing was observed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One assumption about disagreement, and what follows."""

    discordant: float
    """Share of tasks on which the two policies are taken to disagree."""
    detectable: float | None
    """Smallest difference of success rates found with the power asked for; None when so few tasks find none."""
    needed: int | None
    """Tasks needed to find the effect asked for; None when more than `MAX_TASKS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What an evaluation of `num_tasks` tasks can show."""

    num_tasks: int
    """Tasks of the holdout."""
    alpha: float
    """Two-sided error rate of the test."""
    power: float
    """Probability of finding the difference."""
    effect: float
    """Difference of success rates that somebody hopes for."""
    smallest_p: float
    """p-value when one policy wins every task: above `alpha` nothing can be shown, whatever happens."""
    fewest_tasks: int
    """Fewest tasks with which any difference at all can be shown."""
    rows: tuple[PlanRow, ...]
    """One per share of disagreement."""

    @property
    def hopeless(self) -> bool:
        """Whether no result whatever could be told from chance."""
        return self.smallest_p >= self.alpha

    def sentences(self) -> list[str]:
        """The plan in plain words."""
        if self.hopeless:
            return [
                f"{_tasks(self.num_tasks)} cannot show any difference: even if one policy won all of them, p would be "
                f"{self.smallest_p:.2g}, which is not below {self.alpha:.3g}. Use at least {self.fewest_tasks} tasks."
            ]
        said = []
        for row in self.rows:
            found = (
                "no difference"
                if row.detectable is None
                else f"a difference of {100 * row.detectable:.1f} points or more"
            )
            needed = f"more than {MAX_TASKS}" if row.needed is None else str(row.needed)
            said.append(
                f"If the policies disagree on {100 * row.discordant:.0f} % of tasks, {_tasks(self.num_tasks)} find "
                f"{found} with {100 * self.power:.0f} % probability; {100 * self.effect:g} points need {needed} tasks."
            )
        return said


def plan(
    num_tasks: int,
    *,
    effect: float = 0.05,
    alpha: float = 0.05,
    power: float = 0.8,
    shares: tuple[float, ...] = SHARES,
) -> Plan:
    """What `num_tasks` tasks can show at error rate `alpha`, one 0/1 sample per task and policy.

    Several samples per task can only sharpen that. A share below `effect` is raised to it: a difference needs as
    many disagreements. Raises RecordError for numbers out of range.
    """
    _check(num_tasks, alpha, power)
    if not 0 < effect <= 1:
        raise RecordError(f"effect {effect} is not a difference of success rates; use 0.05 for 5 points")
    rows = []
    for share in sorted({max(share, effect) for share in shares}):
        found = detectable_effect(num_tasks, share, alpha=alpha, power=power)
        rows.append(
            PlanRow(
                discordant=share,
                detectable=found if math.isfinite(found) else None,
                needed=needed_tasks(effect, share, alpha=alpha, power=power),
            )
        )
    return Plan(
        num_tasks=num_tasks,
        alpha=alpha,
        power=power,
        effect=effect,
        smallest_p=smallest_p(num_tasks),
        fewest_tasks=fewest_tasks(alpha),
        rows=tuple(rows),
    )


def smallest_p(num_tasks: int) -> float:
    """p-value of exact McNemar when one policy wins every task: `2^(1 - n)`, and 1 for no task."""
    return min(1.0, 2.0 ** (1 - num_tasks))


def fewest_tasks(alpha: float) -> int:
    """Smallest n with `2^(1 - n) < alpha`."""
    num_tasks = 1
    while smallest_p(num_tasks) >= alpha:
        num_tasks += 1
    return num_tasks


def mcnemar_power(num_tasks: int, discordant: float, effect: float, *, alpha: float = 0.05) -> float:
    """Probability that the exact McNemar test rejects, in either direction.

    Tasks are won with probability (discordant + effect) / 2 and lost with (discordant - effect) / 2. The number m of
    discordant tasks is binomial in `num_tasks`; given m, wins are binomial and the test rejects for at most c(m)
    wins or losses, c(m) being the largest c with `2 P(X <= c) < alpha` for X ~ Bin(m, 1/2). With effect 0 this is the
    exact error rate of the test. Raises RecordError for numbers out of range.
    """
    from scipy.stats import binom

    _check(num_tasks, alpha, 0.5)
    if not abs(effect) <= discordant <= 1:
        raise RecordError(
            f"effect {effect} is larger than the share {discordant} of tasks that differ; raise the share"
        )
    if discordant == 0:
        return 0.0
    counts_M = np.arange(num_tasks + 1)
    critical_M = _critical(num_tasks, alpha)
    won = 0.5 + effect / (2 * discordant)
    tail_M = binom.cdf(critical_M, counts_M, won) + binom.cdf(critical_M, counts_M, 1 - won)
    weight_M = binom.pmf(counts_M, num_tasks, discordant)
    return float(min(1.0, (weight_M * np.where(critical_M >= 0, tail_M, 0.0)).sum()))


def detectable_effect(num_tasks: int, discordant: float, *, alpha: float = 0.05, power: float = 0.8) -> float:
    """Smallest difference that the exact test finds with probability `power`; inf when not even 1 is found.

    Where the difference would exceed `discordant`, that is raised with it.
    """
    _check(num_tasks, alpha, power)

    def found(effect: float) -> bool:
        return mcnemar_power(num_tasks, max(discordant, effect), effect, alpha=alpha) >= power

    if not found(1.0):
        return math.inf
    low, high = 0.0, 1.0
    while high - low > 1e-5:  # power rises with the effect at a given share, so bisection finds the crossing
        middle = (low + high) / 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def needed_tasks(effect: float, discordant: float, *, alpha: float = 0.05, power: float = 0.8) -> int | None:
    """Fewest tasks with which the exact test finds `effect` with probability `power`; None above `MAX_TASKS`.

    Power is a saw-tooth in the number of tasks, so this is the first size from which on it stays at or above `power`
    for the next `_TEETH` sizes. The search starts well below Miettinen's (1968) approximation, which is a little
    too small for the exact test.
    """
    _check(1, alpha, power)
    if not 0 < effect <= 1:
        raise RecordError(f"effect {effect} is not above 0 and at most 1; 0.05 stands for 5 points")
    share = max(discordant, effect)
    normal = NormalDist()
    z_test, z_power = normal.inv_cdf(1 - alpha / 2), normal.inv_cdf(power)
    near = (z_test * math.sqrt(share) + z_power * math.sqrt(max(0.0, share - effect * effect))) ** 2 / effect**2
    if near > MAX_TASKS:
        return None
    start = max(1, int(0.7 * near) - 10)
    stays = 0
    for num_tasks in range(start, MAX_TASKS + _TEETH):
        stays = stays + 1 if mcnemar_power(num_tasks, share, effect, alpha=alpha) >= power else 0
        if stays == _TEETH:
            return num_tasks - _TEETH + 1
    return None


_TEETH = 4
"""Sizes for which power has to stay up; the teeth of the exact test are about two tasks wide when all disagree."""

_criticals: dict[float, NDArray[np.int64]] = {}


def _critical(num_tasks: int, alpha: float) -> NDArray[np.int64]:
    """c(m) for m = 0..num_tasks: most losses with which a test on m discordant tasks rejects, -1 for never."""
    from scipy.stats import binom

    known = _criticals.get(alpha)
    if known is None or len(known) <= num_tasks:
        counts_M = np.arange(max(num_tasks + 1, 64 if known is None else 2 * len(known)))
        guess_M = np.asarray(binom.ppf(alpha / 2, counts_M, 0.5)).astype(np.int64)
        # ppf is the smallest c with P(X <= c) >= alpha / 2; the test is strict, so step down until below it.
        while (too_many := (guess_M >= 0) & (2 * binom.cdf(guess_M, counts_M, 0.5) >= alpha)).any():
            guess_M = np.where(too_many, guess_M - 1, guess_M)
        known = _criticals[alpha] = guess_M
    return known[: num_tasks + 1]


def _check(num_tasks: int, alpha: float, power: float) -> None:
    if num_tasks < 1 or not 0 < alpha < 1 or not 0.5 <= power < 1:
        raise RecordError(
            f"num_tasks {num_tasks}, alpha {alpha}, power {power}; give at least 1 task, an alpha between 0 and 1 and "
            "a power from 0.5 to 1"
        )


def _tasks(count: int) -> str:
    return f"{count} task" if count == 1 else f"{count} tasks"
