"""Several runs of one method as one evaluation: the same recipe with other seeds, each tried on the same tasks.

Promises: every rollout of every run counts once, at its own task, so that tasks stay what is resampled and what is
won or lost; runs that were tried on other tasks, for another success, or sampled otherwise are refused. What follows
holds for these runs and new tasks: how far runs differ is said beside it (`spread`), and is no part of an interval.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from leyden.base.errors import RecordError
from leyden.release.costs import total
from leyden.release.results import Evaluation, TaskResult


def pooled(evaluations: Sequence[Evaluation]) -> Evaluation:
    """All of them as one. Raises RecordError for evaluations that do not belong together."""
    first = evaluations[0]
    for name in ("fingerprint", "split", "success", "safety", "sampling"):
        values = [getattr(one, name) for one in evaluations]
        if any(value != values[0] for value in values):
            raise RecordError(
                f"runs of one method differ in {name} ({values}); evaluate them alike, or name each alone"
            )
    if len({one.policy_version for one in evaluations}) < len(evaluations):
        raise RecordError(f"a version is named twice among {[one.policy_version for one in evaluations]}")
    costs = [one.cost for one in evaluations if one.cost is not None]
    walls = [one.wall_s for one in evaluations if one.wall_s is not None]
    return replace(
        first,
        policy_version=" + ".join(one.policy_version for one in evaluations),
        tasks=tuple(_task(found) for found in zip(*(one.tasks for one in evaluations), strict=True)),
        cost=total(costs) if len(costs) == len(evaluations) else None,
        wall_s=math.fsum(walls) if len(walls) == len(evaluations) else None,
    )


def spread(name: str, runs: Sequence[Evaluation], reference: Evaluation) -> str:
    """How far the runs of a method lie apart, in words, and how many of them beat the reference by their mean."""
    means = [one.pass1.mean for one in runs]
    shown = ", ".join(f"{100 * mean:.1f}" for mean in means)
    above = sum(mean > reference.pass1.mean for mean in means)
    return (
        f"{name} stands for {len(runs)} runs, which solved {shown} %; {above} of them more than the reference. "
        "Intervals and tests are over tasks and take these runs as they are."
    )


def _task(found: Sequence[TaskResult]) -> TaskResult:
    assert len({one.task_id for one in found}) == 1, "equal fingerprints mean equal tasks"
    counted = [one for one in found if one.num_counted]
    names = {name for one in counted for name in one.components}
    unsafe = [one.num_unsafe for one in counted]
    return TaskResult(
        task_id=found[0].task_id,
        domain=found[0].domain,
        rewards=tuple(reward for one in found for reward in one.rewards),
        successes=tuple(success for one in found for success in one.successes),
        outcomes=tuple(outcome for one in found for outcome in one.outcomes),
        components={
            name: _weighted([(o.components.get(name), o.num_counted) for o in counted]) or 0.0 for name in names
        },
        num_unscored=sum(one.num_unscored for one in found),
        num_calls=_mean(counted, "num_calls") or 0.0,
        completion_tokens=_mean(counted, "completion_tokens") or 0.0,
        latency_s=_mean(counted, "latency_s"),
        prompt_tokens=_mean(counted, "prompt_tokens"),
        num_retries=_mean(counted, "num_retries"),
        num_wrong_tool_calls=_mean(counted, "num_wrong_tool_calls"),
        num_unsafe=None if None in unsafe else sum(count for count in unsafe if count is not None),
        usd=_mean(counted, "usd"),
    )


def _mean(counted: Sequence[TaskResult], name: str) -> float | None:
    """Mean over rollouts; None where a run does not know it."""
    values = [(getattr(one, name), one.num_counted) for one in counted]
    return None if any(value is None for value, _ in values) else _weighted(values)


def _weighted(values: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None]
    whole = sum(weight for _, weight in known)
    return math.fsum(value * weight for value, weight in known) / whole if whole else None
