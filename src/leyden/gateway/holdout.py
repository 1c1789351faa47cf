"""Keeps tasks of the holdout out of training rollouts that come over REST.

Promises: a rollout with `is_train` whose input is a holdout task of the configuration, or nearly one, is refused with
422 before it is queued, and so is the whole request. Rollouts with `is_train` false pass: that is evaluation.
"""

from collections.abc import Sequence
from dataclasses import replace

from leyden.base.config import Config
from leyden.base.leaks import Guard, refuse
from leyden.base.records import Rollout
from leyden.base.tasks import load_tasks

NAMES = ("data_id", "instance_id")
"""Fields of `input` that name a task in the compatible protocol."""


def holdout_guard(config: Config) -> Guard:
    """Knows the holdout of the configuration, all of it whatever `eval.max_tasks`. Raises TaskError."""
    path = config.tasks.holdout
    held = load_tasks(config.resolve(path), split="holdout") if path else []
    return Guard(held, threshold=config.tasks.near)


def refuse_holdout(guard: Guard, rollouts: Sequence[Rollout]) -> None:
    """Raise HoldoutError when one of `rollouts` would train on the holdout."""
    if not guard.num_tasks:
        return
    tasks = [rollout.task for rollout in rollouts if rollout.mode == "train"]
    # The names that controllers give to data are no part of what is asked.
    asked = [replace(task, input={k: v for k, v in task.input.items() if k not in NAMES}) for task in tasks]
    refuse(guard.of_tasks(asked), "rollouts")
