"""What a run has used of its budget, from what it recorded, and whether that is the end.

Promises: only recorded work counts, so a stopped and resumed run counts what the store holds and nothing twice; the
sentence says which limit was met, by which number, and how to go on. Limits are looked at between steps and
evaluations: the work in hand is finished, so a run may exceed a limit by one step or one evaluation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from leyden.base.config import BudgetConfig, Config, CostsConfig
from leyden.release.costs import Cost, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What was used."""

    cost: Cost
    """Of all rollouts of steps and evaluations."""
    work_s: float
    """Recorded wall time of steps and evaluations."""
    machine_usd: float
    """That time at the price of the machine; 0 without a price."""

    @property
    def tokens(self) -> int:
        """Read and sampled by calls."""
        return self.cost.tokens

    @property
    def minutes(self) -> float:
        """Of recorded work."""
        return self.work_s / 60

    @property
    def usd(self) -> float:
        """For calls that have a price, and for the machine."""
        return (self.cost.usd or 0.0) + self.machine_usd

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"tokens": self.tokens, "minutes": self.minutes, "usd": self.usd, "cost": self.cost.to_json()}


def spent(steps: Iterable[Mapping[str, Any]], evaluations: Iterable[Mapping[str, Any]], prices: CostsConfig) -> Spent:
    """What a run used, from the reports of its steps and the results of its evaluations."""
    reports, results = list(steps), list(evaluations)
    costs = [Cost.from_json(row["cost"]) for row in [*reports, *results] if row.get("cost")]
    work_s = sum(step_s(report) for report in reports) + sum(result.get("wall_s") or 0.0 for result in results)
    return Spent(cost=total(costs), work_s=work_s, machine_usd=work_s / 3600 * prices.machine_usd_per_hour)


def step_s(report: Mapping[str, Any]) -> float:
    """Wall time of a step: its rollouts and its update, whose parts are not counted again."""
    seconds = report.get("seconds") or {}
    return float(seconds.get("rollouts", 0.0) + seconds.get("update", 0.0))


def exceeded(used: Spent, limits: BudgetConfig) -> str | None:
    """The sentence that ends a run, or None while it may go on."""
    for name, limit, value in (
        ("tokens", limits.tokens, float(used.tokens)),
        ("minutes", limits.minutes, used.minutes),
        ("usd", limits.usd, used.usd),
    ):
        if limit is not None and value >= limit:
            return (
                f"the budget is spent: {value:,.6g} of {limit:,.6g} {name} are used (budget.{name}); everything done "
                f"is saved, go on with `--resume RUN_FOLDER --set budget.{name}=MORE`"
            )
    return None


def cannot_bind(config: Config) -> str | None:
    """Why a limit on money may never be met, or None."""
    priced = any(config.price_of(name) is not None for name in config.policies)
    if config.budget.usd is None or config.costs.machine_usd_per_hour or priced:
        return None
    return (
        "budget.usd counts nothing: no policy or provider has a price (usd_per_million), nor has the machine "
        "(costs.machine_usd_per_hour)"
    )
