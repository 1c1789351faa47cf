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
    guard = guard_of(config, held)
    leaks.refuse(guard.of_tasks(trained), "tasks of tasks.train and tasks.val")
    leaks.refuse(guard.of_demos(demos), "demonstrations of tasks.demos")


def guard_of(config: Config, held: Sequence[Task]) -> leaks.Guard:
    """Knows the holdout, by words and by `tasks.near_model` where there is one. Raises ModelUnusable."""
    tasks, meaning = config.tasks, None
    if tasks.near_model and tasks.near < 1:
        from leyden.learning.backends.embeddings import embedder  # loads torch, which most verbs do not need

        meaning = leaks.Meaning(embed=embedder(config.resolve(tasks.near_model)), cosine=tasks.near_cosine)
    return leaks.Guard(held, threshold=tasks.near, meaning=meaning)


def plan_of(config: Config, num_tasks: int, look: int, effect: float = 0.05) -> power.Plan | None:
    """What `num_tasks` tasks can show at the error rate of look number `look`; None when nothing is left to spend."""
    alpha = multiplicity.spent_at(look, 1 - config.eval.level, config.eval.looks)
    return power.plan(num_tasks, effect=effect, alpha=alpha) if alpha else None
