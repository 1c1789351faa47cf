"""The gate: is the candidate better than the incumbent on the same tasks, and how sure is that?

Promises: pairs are the same tasks of the same fingerprint or it refuses; the answer is `better` or `worse`
only when the test rejects at 1 - level and the interval of the difference excludes 0 on that side, so two
runs of one policy are called different with a probability of at most 1 - level. Does not correct for
several looks by itself: `holdout.level_at` gives the level of a look, and 1 (an error rate that is spent)
calls nothing different. Does not deploy anything.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from leyden.base import stats
from leyden.base.errors import RecordError
from leyden.base.records import Verdict
from leyden.release.results import Evaluation, TaskResult

Metric = Literal["success", "reward"]

MCNEMAR = "exact McNemar"
"""Name of the test for one 0/1 sample per task."""

SIGN_FLIP = "sign-flip permutation of task means"
"""Name of the test for everything else."""

_NUM_NAMED = 5
"""Task ids that a message names; more make it unreadable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Verdict):
    """A verdict with the evidence that its sentence needs."""

    metric: Metric
    """What was compared: `success` is a share of tasks, `reward` the total reward."""
    num_won: int
    """Tasks on which the candidate did better."""
    num_lost: int
    """Tasks on which it did worse."""
    num_left_out: int
    """Tasks without a rollout that counts in one of the two evaluations."""
    detectable: float | None
    """Smallest difference that so many tasks show with 80 % probability, in the unit of the metric; None when
    so few cannot show any."""
    interval: str
    """How the interval was made."""
    alpha: float = 0.05
    """Error rate that the answer may use; 0 when it is spent, and then nothing is called different."""


def compare(
    candidate: Evaluation,
    incumbent: Evaluation,
    *,
    metric: Metric = "success",
    level: float | None = None,
    resamples: int | None = None,
    seed: int | None = None,
) -> Comparison:
    """The verdict about `candidate`; level, resamples and seed default to those of the candidate's
    evaluation.

    A level of 1 claims nothing; the interval then has the level of the evaluation. Exact McNemar for one 0/1
    sample per task and side, otherwise a sign-flip permutation test on the
    differences of task means; the interval resamples tasks (`stats.paired_interval`).

    Raises RecordError when fingerprint, tasks, split or success component differ, when no task is left, and
    for the metric `reward` when a failed agent left no reward.
    """
    _check_same(candidate, incumbent)
    level = candidate.level if level is None else level
    alpha = 1 - level
    if level >= 1:  # an error rate that is spent has no interval of its own
        alpha, level = 0.0, candidate.level
    resamples = candidate.resamples if resamples is None else resamples
    seed = candidate.seed if seed is None else seed
    pairs = [
        (ours, theirs)
        for ours, theirs in zip(candidate.tasks, incumbent.tasks, strict=True)
        if ours.num_counted and theirs.num_counted
    ]
    if not pairs:
        raise RecordError(
            "no task has a rollout that counts in both evaluations; look at their outcomes and run them again"
        )
    single = metric == "success" and all(ours.num_counted == theirs.num_counted == 1 for ours, theirs in pairs)
    differences_N = [_mean(ours, metric) - _mean(theirs, metric) for ours, theirs in pairs]
    # Means of equal samples in another order differ by rounding, and that is no difference.
    differences_N = [0.0 if abs(value) < 1e-12 else value for value in differences_N]
    num_won = sum(value > 0 for value in differences_N)
    num_lost = sum(value < 0 for value in differences_N)
    if single:
        p_value = stats.mcnemar_exact(num_won, num_lost)
    else:
        p_value = stats.sign_flip_permutation(differences_N, resamples=resamples, seed=seed)
    interval = stats.paired_interval(differences_N, level=level, resamples=resamples, seed=seed, binary=single)
    answer: Literal["better", "worse", "not separable"] = "not separable"
    if p_value < alpha and not interval.low <= 0 <= interval.high:
        answer = "better" if interval.mean > 0 else "worse"
    detectable = _detectable(differences_N, single, level)
    bound = 1.0 if metric == "success" else math.inf
    return Comparison(
        answer=answer,
        candidate=candidate.policy_version,
        incumbent=incumbent.policy_version,
        difference=interval.mean,
        low=max(interval.low, -bound),
        high=min(interval.high, bound),
        p_value=p_value,
        test=MCNEMAR if single else SIGN_FLIP,
        num_tasks=len(pairs),
        level=level,
        metric=metric,
        num_won=num_won,
        num_lost=num_lost,
        num_left_out=len(candidate.tasks) - len(pairs),
        detectable=detectable if math.isfinite(detectable) else None,
        interval=interval.method,
        alpha=alpha,
    )


def explain(verdict: Verdict) -> str:
    """The verdict in plain words, for example "+18.5 points (12.1 to 24.9), 61 tasks won, 12 lost, ...:
    better".
    """
    points = not isinstance(verdict, Comparison) or verdict.metric == "success"
    scale, unit, digits = (100, " points", 1) if points else (1, " reward", 3)
    if math.isfinite(verdict.low) and math.isfinite(verdict.high):
        ends = f"{verdict.low * scale:.{digits}f} to {verdict.high * scale:.{digits}f}"
    else:
        ends = "no interval from one task"
    parts = [f"{verdict.difference * scale:+.{digits}f}{unit} ({ends})"]
    if isinstance(verdict, Comparison):
        parts.append(f"{_tasks(verdict.num_won)} won, {verdict.num_lost} lost of {verdict.num_tasks}")
    else:
        parts.append(f"{_tasks(verdict.num_tasks)} compared")
    parts.append(f"p = {_p(verdict.p_value)}")
    sentence = f"{', '.join(parts)}: {verdict.answer}"
    if isinstance(verdict, Comparison):
        if verdict.answer == "not separable" and not verdict.alpha:
            sentence += "; the planned looks at these tasks are used up (eval.looks), so nothing can be claimed"
        elif verdict.answer == "not separable":
            sentence += f"; {_can_show(verdict, scale, unit, digits)}"
        if verdict.num_left_out:
            sentence += f"; {_tasks(verdict.num_left_out)} left out because no rollout counted in one of the two"
    return sentence


def _check_same(candidate: Evaluation, incumbent: Evaluation) -> None:
    ours = {task.task_id for task in candidate.tasks}
    theirs = {task.task_id for task in incumbent.tasks}
    if ours != theirs:
        raise RecordError(
            f"{candidate.policy_version} and {incumbent.policy_version} were evaluated on different tasks: "
            f"only the first has {_named(ours - theirs)}, only the second has {_named(theirs - ours)}; "
            "evaluate both on the same split"
        )
    for name in ("fingerprint", "split", "success"):
        if getattr(candidate, name) != getattr(incumbent, name):
            raise RecordError(
                f"{candidate.policy_version} has {name} {getattr(candidate, name)!r} and "
                f"{incumbent.policy_version} has {getattr(incumbent, name)!r}; "
                "evaluate both with the same tasks and rewards"
            )


def _named(task_ids: set[str]) -> str:
    if not task_ids:
        return "none"
    ids = sorted(task_ids)
    more = f" and {len(ids) - _NUM_NAMED} more" if len(ids) > _NUM_NAMED else ""
    return ", ".join(repr(task_id) for task_id in ids[:_NUM_NAMED]) + more


def _mean(task: TaskResult, metric: Metric) -> float:
    if metric == "success":
        return sum(task.successes) / task.num_counted
    rewards = [reward for reward in task.rewards if reward is not None]
    if len(rewards) < task.num_counted:
        raise RecordError(
            f"task {task.task_id!r} has {task.num_counted - len(rewards)} rollouts of a failed agent without "
            "a reward; compare by success, or give failures a reward with rewards.on_failure"
        )
    return math.fsum(rewards) / len(rewards)


def _detectable(differences_N: list[float], single: bool, level: float) -> float:
    num_tasks = len(differences_N)
    if single:
        # One more than was seen, so that no disagreement at all is not taken for "never".
        share = min(1.0, (sum(value != 0 for value in differences_N) + 1) / num_tasks)
        return stats.minimum_detectable_effect(num_tasks, share, level=level)
    if num_tasks < 2:
        return math.inf
    deviation = float(np.std(differences_N, ddof=1))
    return stats.minimum_detectable_shift(num_tasks, deviation, level=level)


def _can_show(verdict: Comparison, scale: float, unit: str, digits: int) -> str:
    if verdict.detectable is None:
        return f"{_tasks(verdict.num_tasks)} cannot show any difference, use more"
    return (
        f"{_tasks(verdict.num_tasks)} show a difference of {verdict.detectable * scale:.{digits}f}{unit} "
        "or more four times in five"
    )


def _tasks(count: int) -> str:
    return f"{count} task" if count == 1 else f"{count} tasks"


def _p(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}" if value >= 0.001 else f"{value:.0e}".replace("e-0", "e-")
