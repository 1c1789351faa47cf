"""Which tasks when, under which ids, at which learning rate. The schedule is synchronous and has no state.

It promises that a step is the same whenever it is asked for: tasks, group ids, rollout ids and seeds follow
from the run, the seed and the step alone, so a resumed run finds the rollouts that it asked for before it
died.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from leyden.base.errors import HoldoutError, TaskError
from leyden.base.records import Mode, Rollout, Task
from leyden.learning.credit import GroupStats
from leyden.learning.order import digest, draw, shuffled

Shape = Literal["constant", "linear", "cosine"]


class TaskOrder:
    """An endless sequence of shuffled epochs over tasks, cut into steps.

    Every task comes once per epoch; a step may span two epochs. The order depends on the ids of the tasks and
    the seed, not on the order of the file. Raises TaskError for no tasks or an id that is there twice,
    HoldoutError for a holdout task.
    """

    def __init__(self, tasks: Sequence[Task], tasks_per_step: int, seed: int) -> None:
        assert tasks_per_step >= 1, tasks_per_step
        if not tasks:
            raise TaskError("there are no tasks to train on; give tasks.train a file with at least one")
        seen: set[str] = set()
        for task in tasks:
            if task.id in seen:
                raise TaskError(f"task id {task.id!r} is there twice; ids must be unique within tasks.train")
            seen.add(task.id)
            _refuse_holdout(task)
        self._tasks = tuple(tasks)
        self._tasks_per_step = tasks_per_step
        self._seed = seed
        self._epoch: tuple[int, list[Task]] = (-1, [])

    def tasks_at(self, step: int) -> list[Task]:
        """The tasks of a step, counted from 0; the same whenever it is asked."""
        first = step * self._tasks_per_step
        return [self._at(place) for place in range(first, first + self._tasks_per_step)]

    def refill_at(self, step: int, number: int, num_tasks: int, taken: Collection[str]) -> list[Task]:
        """Up to `num_tasks` further tasks for a step, none of the ids in `taken`; fewer where no others are left.

        They are drawn for this step and `number` alone and do not move the order of `tasks_at`, so a resumed run needs
        no record of what earlier steps were refilled with.
        """
        drawn = shuffled(self._tasks, lambda task: task.id, "refill", self._seed, step, number)
        return [task for task in drawn if task.id not in taken][:num_tasks]

    def _at(self, place: int) -> Task:
        epoch, within = divmod(place, len(self._tasks))
        if self._epoch[0] != epoch:
            self._epoch = (epoch, shuffled(self._tasks, lambda task: task.id, "tasks", self._seed, epoch))
        return self._epoch[1][within]


def plan_step(
    run_id: str,
    step: int,
    tasks: Sequence[Task],
    group_size: int,
    policy_versions: Mapping[str, int],
    *,
    seed: int = 0,
    mode: Mode = "train",
    sampling: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    created_at: float = 0.0,
    first_place: int = 0,
) -> list[Rollout]:
    """`group_size` rollouts for each of `tasks`, group after group, ready to be put in the queue.

    Ids follow from (run_id, step, mode, place of the task in the step, task, k). The seeds of rollouts follow
    from `seed` instead of the run, so that a second run of the same configuration samples the same. Raises
    HoldoutError for a holdout task in mode `train`. `first_place` is the place of the first of `tasks` in the step:
    above 0 when a step asks for more.
    """
    rollouts: list[Rollout] = []
    for place, task in enumerate(tasks, first_place):
        if mode == "train":
            _refuse_holdout(task)
        name = (run_id, step, mode, place, task.id)
        group_id = f"group_{digest('group', *name)}"
        rollouts.extend(
            Rollout(
                id=f"rollout_{digest('rollout', *name, k)}",
                task=task,
                mode=mode,
                run_id=run_id,
                group_id=group_id,
                step=step,
                policy_versions=dict(policy_versions),
                sampling=dict(sampling or {}),
                seed=draw("seed", seed, step, mode, place, task.id, k),
                config=dict(config or {}),
                metadata=dict(metadata or {}),
                created_at=created_at,
                updated_at=created_at,
            )
            for k in range(group_size)
        )
    return rollouts


def learning_rate_at(step: int, total: int, schedule: Shape, warmup: int, peak: float) -> float:
    """Learning rate of a step, counted from 0, of `total`.

    Warm-up is linear and reaches `peak` at its last step. After it, with p the share of the remaining steps
    that is over: `constant` peak, `linear` peak * (1 - p), `cosine` peak * (1 + cos(pi * p)) / 2. The last
    step is still above 0.
    """
    assert 0 <= step < max(total, 1), (step, total)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(total - warmup, 1)
    if schedule == "linear":
        return peak * (1.0 - progress)
    if schedule == "cosine":
        return peak * (1.0 + math.cos(math.pi * progress)) / 2.0
    return peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Tasks that teach nothing because all their rollouts end alike."""

    memorised: Sequence[str]
    """Every rollout reached `success`: nothing is left to learn; sorted ids."""
    hopeless: Sequence[str]
    """No rollout got above `failure`: nothing can be learned yet; sorted ids."""
    num_tasks: int
    """Tasks in the history."""


def diagnose(
    history: Iterable[GroupStats], *, success: float = 1.0, failure: float = 0.0, window: int = 2
) -> Diagnosis:
    """Name tasks whose rollouts all succeed or all fail, over the last `window` groups of each task.

    `history` is in the order of training. A reward counts as success from `success` on and as failure up to
    `failure`. Groups with a single rollout count like others.
    """
    assert window >= 1 and success > failure, (window, success, failure)
    by_task: defaultdict[str, list[Sequence[float]]] = defaultdict(list)
    for group in history:
        by_task[group.task_id].append(group.rewards)
    latest = {task: [r for rewards in groups[-window:] for r in rewards] for task, groups in by_task.items()}
    return Diagnosis(
        memorised=sorted(task for task, rewards in latest.items() if min(rewards) >= success),
        hopeless=sorted(task for task, rewards in latest.items() if max(rewards) <= failure),
        num_tasks=len(by_task),
    )


def _refuse_holdout(task: Task) -> None:
    if task.split == "holdout":
        raise HoldoutError(
            f"task {task.id!r} is of the holdout and would be trained on; move it to tasks.train, or ask for "
            "an evaluation instead"
        )
