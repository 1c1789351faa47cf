"""What the command line does to keep a holdout honest: leaks refused, and said beforehand what it can show."""

from collections.abc import Sequence

from leyden.base import leaks, multiplicity, power
from leyden.base.config import Config
from leyden.base.records import Task
from leyden.base.tasks import Demo


def refuse_leaks(config: Config, trained: Sequence[Task], held: Sequence[Task], demos: Sequence[Demo]) -> None:
    """Raise HoldoutError when something that is learned from, or watched, is like a task of the holdout."""
    if not held:
        return
    guard = leaks.Guard(held, threshold=config.tasks.near)
    leaks.refuse(guard.of_tasks(trained), "tasks of tasks.train and tasks.val")
    leaks.refuse(guard.of_demos(demos), "demonstrations of tasks.demos")


def plan_of(config: Config, num_tasks: int, look: int, effect: float = 0.05) -> power.Plan | None:
    """What `num_tasks` tasks can show at the error rate of look number `look`; None when nothing is left to spend."""
    alpha = multiplicity.spent_at(look, 1 - config.eval.level, config.eval.looks)
    return power.plan(num_tasks, effect=effect, alpha=alpha) if alpha else None
