"""What keeps a holdout worth something: it is never trained on, it does not change, and looks are counted.

Promises: `guard` refuses training on a holdout task; equal tasks have equal fingerprints whatever their
order. Does not keep the count of looks: the store does, by the fingerprint, and hands it in.
"""

import hashlib
from collections.abc import Iterable
from typing import Protocol

from leyden.base.errors import HoldoutError
from leyden.base.records import Mode, Rollout, Task, to_json

_NUM_NAMED = 5
"""Task ids that a message names; more make it unreadable."""


class Seen(Protocol):
    """A recorded evaluation, as far as looks are concerned."""

    @property
    def run_id(self) -> str | None:
        """The run that asked for it."""


def guard(asked: Iterable[Task | Rollout], mode: Mode = "train") -> None:
    """Do nothing if `asked` may be run: tasks in `mode`, rollouts in their own mode.

    Raises HoldoutError when a holdout task would be trained on.
    """
    held = []
    for one in asked:
        task, its_mode = (one, mode) if isinstance(one, Task) else (one.task, one.mode)
        if its_mode == "train" and task.split == "holdout":
            held.append(task.id)
    if held:
        named = ", ".join(repr(task_id) for task_id in held[:_NUM_NAMED])
        more = f" and {len(held) - _NUM_NAMED} more" if len(held) > _NUM_NAMED else ""
        raise HoldoutError(
            f"task {named}{more} belongs to the holdout and would be trained on; "
            "run it with mode 'val', or move it to the train split before the first evaluation"
        )


def fingerprint(tasks: Iterable[Task]) -> str:
    """Hash of what is asked and how it is checked: ids, splits, domains, inputs and answers, in any order."""
    lines = sorted(to_json([task.id, task.split, task.domain, dict(task.input), task.answer]) for task in tasks)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def looks(evaluations: Iterable[Seen]) -> int:
    """How often somebody looked at a holdout, given its recorded evaluations (this one included).

    The evaluations of one run are one look: nothing is chosen between them. One without a run is a look.
    """
    runs = [one.run_id for one in evaluations]
    return len({run_id for run_id in runs if run_id is not None}) + runs.count(None)


def sentence(num_looks: int, level: float = 0.95) -> str:
    """What `num_looks` looks at one holdout mean for a claim, in plain words.

    The chance of at least one false claim in k comparisons is at most `k (1 - level)` (Bonferroni), whatever
    their dependence.
    """
    if num_looks <= 1:
        return "This holdout was looked at for the first time, so the stated error rate holds as it stands."
    chance = min(1.0, num_looks * (1 - level))
    return (
        f"This was look {num_looks} at the same holdout. Choosing the best of {num_looks} looks can "
        "raise the "
        f"chance of a false claim from {1 - level:.2g} to as much as {chance:.2g}; confirm a narrow "
        "result on "
        "fresh tasks."
    )
