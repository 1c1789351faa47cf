"""What keeps a holdout worth something: it is never trained on, looks are counted, and each look spends error.

Promises: `guard` refuses training on a holdout task; with the level that `level_at` gives, the chance of any false
claim over all looks at one holdout is at most `1 - eval.level`. Does not keep the count of looks: the store
does, by the fingerprint of `base.tasks`, and hands it in. What is like a task of the holdout is found by
`base.leaks`.
"""

from collections.abc import Iterable
from typing import Protocol

from leyden.base.errors import HoldoutError
from leyden.base.multiplicity import spent_at
from leyden.base.records import Mode, Rollout, Task

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


def looks(evaluations: Iterable[Seen]) -> int:
    """How often somebody looked at a holdout, given its recorded evaluations (this one included).

    The evaluations of one run are one look: nothing is chosen between them. One without a run is a look.
    """
    runs = [one.run_id for one in evaluations]
    return len({run_id for run_id in runs if run_id is not None}) + runs.count(None)


def look_of(evaluations: Iterable[Seen], run_id: str | None) -> int:
    """Which look at a holdout `run_id` is, from 1: runs in the order of their first evaluation (as given).

    A run that has no evaluation yet is the next one; so is None.
    """
    seen: list[str | None] = []
    for one in evaluations:
        if one.run_id is None or one.run_id not in seen:
            seen.append(one.run_id)
    return seen.index(run_id) + 1 if run_id is not None and run_id in seen else len(seen) + 1


def level_at(look: int, level: float, planned: int = 0) -> float:
    """Confidence level of look number `look`, so that all looks together err with a chance of at most 1 - level.

    1 when the planned looks are used up: no difference whatever is then claimed.
    """
    return 1.0 - spent_at(max(1, look), 1.0 - level, planned)


def sentence(num_looks: int, level: float = 0.95, planned: int = 0) -> str:
    """What look number `num_looks` at one holdout may claim, in plain words."""
    look, alpha = max(1, num_looks), 1 - level
    spent = spent_at(look, alpha, planned)
    which = (
        "This holdout was looked at for the first time" if look == 1 else f"This was look {look} at the same holdout"
    )
    if spent == 0:
        return (
            f"{which}, and only {planned} were planned (eval.looks): the error rate of {alpha:.2g} is spent, so "
            "nothing more can be claimed on it. Use fresh tasks."
        )
    share = f"1 of {planned} planned looks" if planned else "a look without a plan (eval.looks)"
    advice = " Confirm a narrow result on fresh tasks." if look > 1 else ""
    return (
        f"{which}. Verdicts here use an error rate of {spent:.2g}, the part of {alpha:.2g} that {share} may spend: "
        f"over all looks together the chance of a false claim stays below {alpha:.2g}.{advice}"
    )
