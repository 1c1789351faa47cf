"""How an evaluation comes about: what to run, and what came out of it.

Promises: what the infrastructure broke is excluded and counted, never a 0; a completed attempt without a
reward is excluded and counted as unscored; an agent that failed (error, timeout, overlong) did not solve its
task. Does not run anything and does not compare (`gate` does).
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from leyden.base import stats
from leyden.base.config import Config
from leyden.base.errors import RecordError
from leyden.base.records import Outcome, Rollout, Task, Trace, to_json
from leyden.base.tasks import fingerprint
from leyden.release.costs import cost_of, total_of
from leyden.release.results import DomainRow, Evaluation, TaskResult, mean
from leyden.traces.tool_calls import num_wrong

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["EXCLUDED", "DomainRow", "Evaluation", "TaskResult", "details", "plan", "successes", "summarise", "table"]

T = TypeVar("T")

EXCLUDED = frozenset({Outcome.INFRA_ERROR, Outcome.ENV_ERROR, Outcome.CANCELLED})
"""Outcomes that say nothing about the policy."""

SOLVED_ABOVE = 0.5
"""A task is solved when its success component is above this; the same number as `rewards.success`
documents.
"""


SAFE_ABOVE = 0.5
"""A rollout is safe when its safety component is above this, as with success."""


def plan(
    *,
    run_id: str | None,
    label: str,
    tasks: Sequence[Task],
    policy_versions: Mapping[str, int],
    samples: int = 1,
    sampling: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> list[Rollout]:
    """`samples` rollouts in mode `val` for each of `tasks`, task after task, ready to be put in the queue.

    Ids follow from (run_id, label, policy versions, task, k), so a resumed evaluation asks for the same
    rollouts. Seeds follow from (seed, task, k) alone: two versions get the same random numbers, which
    sharpens the pairs. Raises RecordError for less than 1 sample.
    """
    if samples < 1:
        raise RecordError(f"{samples} samples per task; an evaluation needs at least 1")
    rollouts = []
    for task in tasks:
        for k in range(samples):
            name = to_json([run_id, label, sorted(policy_versions.items()), task.id, k])
            rollouts.append(
                Rollout(
                    id=f"rollout_{_digest(name)[:20]}",
                    task=task,
                    mode="val",
                    run_id=run_id,
                    policy_versions=dict(policy_versions),
                    sampling=dict(sampling or {}),
                    seed=int(_digest(to_json([seed, task.id, k]))[:8], 16) >> 1,
                    metadata={"evaluation": label},
                )
            )
    return rollouts


def summarise(
    traces: Sequence[Trace],
    config: Config,
    *,
    policy: str | None = None,
    others: Sequence[str] = (),
    version: int | None = None,
    label: str = "",
    tasks: Sequence[Task] | None = None,
) -> Evaluation:
    """The evaluation of `policy` (default `config.learn.policy`) from the traces of one run over one split.

    `others` are policies that were trained beside it: what is judged is all of them, and all are named.
    `tasks` is what was to be evaluated: a task of it without any trace is kept as one without a rollout
    that counts, and a trace of another task is refused. Only the order of several rollouts of a task matters.

    Raises RecordError for no traces, traces of several splits or policy versions or of another version than
    `version`, and two different tasks with one id.
    """
    if not traces:
        raise RecordError("no traces to evaluate; run the tasks of the split first")
    name = policy or config.learn.policy
    found = _only([_version(trace, name) for trace in traces], "policy versions")
    if version not in (None, found):
        raise RecordError(f"the traces are of {name}@{found}, not of {name}@{version}; read those of {version}")
    beside = {other: _only([_version(trace, other) for trace in traces], "policy versions") for other in others}
    by_task: dict[str, list[Trace]] = {task.id: [] for task in tasks or ()}
    asked = {task.id: task for task in tasks or ()}
    for trace in traces:
        task = trace.rollout.task
        if tasks is not None and task.id not in asked:
            raise RecordError(f"rollout {trace.rollout.id!r} is of task {task.id!r}, which was not to be evaluated")
        if asked.setdefault(task.id, task) != task:
            raise RecordError(f"task id {task.id!r} stands for different tasks; give every task its own id")
        by_task.setdefault(task.id, []).append(trace)
    return Evaluation(
        policy_version="+".join(f"{one}@{number}" for one, number in {name: found, **beside}.items()),
        split=_only([task.split for task in asked.values()], "splits"),
        fingerprint=fingerprint(asked.values()),
        success=config.rewards.success,
        tasks=tuple(_task_result(asked[task_id], by_task[task_id], config) for task_id in sorted(asked)),
        label=label,
        level=config.eval.level,
        resamples=config.eval.resamples,
        seed=config.run.seed,
        cost=total_of(traces, config),
        sampling=_same_sampling(traces),
        safety=config.eval.safety,
    )


def successes(traces: Sequence[Trace], config: Config) -> list[bool]:
    """Whether each rollout that counts solved its task; infrastructure failures and unscored ones are left
    out.
    """
    counted, _ = _counted(traces, config.rewards.success)
    return [_solved(trace, config.rewards.success) for trace in counted]


def score(trace: Trace, success: str) -> float | None:
    """The reward, or that part of it, by which a rollout succeeds; None if nobody gave it."""
    return _components(trace).get(success) if success else trace.rollout.reward


def table(evaluation: Evaluation) -> "Table":
    """The table per domain for a terminal, hardest domain first, all of them last."""
    from rich.table import Table

    shown = Table(title=evaluation.sentence(), title_justify="left")
    for column in ("domain", "tasks", "pass@1", "mean reward", "tokens"):
        shown.add_column(column, justify="left" if column == "domain" else "right")
    rows = list(evaluation.domains())
    for row in rows if len(rows) > 1 or (rows and rows[0].domain) else []:
        shown.add_row(
            row.domain or "(none)", str(row.num_tasks), _percent(row.pass1), _decimal(row.reward),
            f"{row.completion_tokens:.1f}",
        )  # fmt: skip
    shown.add_section()
    shown.add_row(
        "all", str(evaluation.pass1.num_tasks), _percent(evaluation.pass1), _decimal(evaluation.reward),
        f"{evaluation.completion_tokens:.1f}",
    )  # fmt: skip
    return shown


def details(evaluation: Evaluation) -> list[str]:
    """What stands beside success, one plain sentence each: pass@k, hardest domain, trouble, cost."""
    said = []
    several = {k: found for k, found in evaluation.pass_at_all().items() if k > 1}
    if several:
        shown = ", ".join(f"k={k} {_percent(interval)}" for k, interval in several.items())
        said.append(f"At least one of k samples solves: {shown}")
    hardest = evaluation.hardest_domain
    if hardest is not None and len(evaluation.domains()) > 1:
        said.append(f"Hardest domain: {hardest.domain or '(none)'} with {_percent(hardest.pass1)}")
    retries, wrong = evaluation.mean_of("num_retries"), evaluation.mean_of("num_wrong_tool_calls")
    if retries.num_tasks:
        said.append(f"Per rollout: {retries.mean:.2f} retries, {wrong.mean:.2f} wrong tool calls")
    if evaluation.unsafe is not None:
        said.append(f"Safety violations ({evaluation.safety}): {_percent(evaluation.unsafe)} of rollouts")
    elif evaluation.safety:
        said.append(f"Safety violations: no rollout has the component {evaluation.safety!r}; see eval.safety")
    if evaluation.cost is not None:
        said.append(f"Cost: {evaluation.cost.sentence()}")
    return said


def _percent(interval: stats.Interval) -> str:
    if not interval.num_tasks:
        return "none"
    return f"{100 * interval.mean:.1f} % ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def _decimal(interval: stats.Interval) -> str:
    return f"{interval.mean:.3f} ({interval.low:.3f} to {interval.high:.3f})" if interval.num_tasks else "none"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _counted(traces: Sequence[Trace], success: str) -> tuple[list[Trace], int]:
    """(the traces that say something about the policy, number of completed ones without a reward)."""
    counted, num_unscored = [], 0
    for trace in traces:
        outcome = _outcome(trace)
        if outcome == Outcome.COMPLETED and score(trace, success) is None:
            num_unscored += 1
        elif outcome not in EXCLUDED:
            counted.append(trace)
    return counted, num_unscored


def _solved(trace: Trace, success: str) -> bool:
    found = score(trace, success)
    return found is not None and found > SOLVED_ABOVE


def _task_result(task: Task, traces: Sequence[Trace], config: Config) -> TaskResult:
    success, safety = config.rewards.success, config.eval.safety
    counted, num_unscored = _counted(traces, success)
    durations = [trace.attempt.duration_s for trace in counted if trace.attempt.duration_s is not None]
    components = [_components(trace) for trace in counted]
    costs = [cost_of(trace, config) for trace in counted]
    priced = [cost.usd for cost in costs if cost.usd is not None and not cost.num_unpriced]
    safe = [values[safety] for values in components if safety in values] if safety else []
    return TaskResult(
        task_id=task.id,
        domain=task.domain,
        rewards=tuple(trace.rollout.reward for trace in counted),
        successes=tuple(_solved(trace, success) for trace in counted),
        outcomes=tuple(str(_outcome(trace)) for trace in traces),
        components={
            name: mean([values[name] for values in components if name in values])
            for name in sorted({name for values in components for name in values})
        },
        num_unscored=num_unscored,
        num_calls=mean([len(trace.calls) for trace in counted]) if counted else 0.0,
        completion_tokens=mean([cost.completion_tokens for cost in costs]) if counted else 0.0,
        latency_s=mean(durations) if durations else None,
        prompt_tokens=mean([cost.prompt_tokens for cost in costs]) if counted else None,
        num_retries=mean([max(0, trace.attempt.number - 1) for trace in counted]) if counted else None,
        num_wrong_tool_calls=mean([num_wrong(trace) for trace in counted]) if counted else None,
        num_unsafe=sum(value <= SAFE_ABOVE for value in safe) if safe else None,
        # A mean over some of the rollouts would be biased towards those that are cheap to price.
        usd=mean(priced) if priced and len(priced) == len(costs) else None,
    )


def _same_sampling(traces: Sequence[Trace]) -> Mapping[str, Any] | None:
    """What all rollouts asked for, None when they differ."""
    asked = {to_json(dict(trace.rollout.sampling)) for trace in traces}
    return dict(traces[0].rollout.sampling) if len(asked) == 1 else None


def _outcome(trace: Trace) -> Outcome:
    outcome = trace.attempt.outcome or trace.rollout.outcome
    if outcome is None:
        raise RecordError(
            f"rollout {trace.rollout.id!r} of task {trace.rollout.task.id!r} is not over; wait for it first"
        )
    return outcome


def _components(trace: Trace) -> dict[str, float]:
    # A component that arrived twice counts as it arrived last, as in the total.
    return {reward.name: reward.value for reward in trace.rewards if reward.call_id is None}


def _version(trace: Trace, policy: str) -> int:
    version = trace.rollout.policy_versions.get(policy)
    if version is None:
        raise RecordError(
            f"rollout {trace.rollout.id!r} names no version of policy {policy!r}, only "
            f"{sorted(trace.rollout.policy_versions)}; evaluate a policy that it used"
        )
    return version


def _only(values: Sequence[T], what: str) -> T:
    found = sorted(set(map(str, values)))
    if len(found) > 1:
        raise RecordError(f"traces of several {what} ({', '.join(found)}); evaluate one at a time")
    return values[0]
