"""What a policy version did on a split, task by task, with intervals.

Promises: what the infrastructure broke is excluded and counted, never a 0; a completed attempt without a
reward is excluded and counted as unscored; an agent that failed (error, timeout, overlong) did not solve
its task. The JSON form is versioned, and a newer one is refused. Does not run anything and does not compare
(`gate` does); `plan` only writes down what has to be run.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from leyden.base import stats
from leyden.base.config import Config
from leyden.base.errors import RecordError
from leyden.base.records import Outcome, Rollout, Split, Task, Trace, to_json
from leyden.release.holdout import fingerprint

if TYPE_CHECKING:
    from rich.table import Table

T = TypeVar("T")

SCHEMA = 1
"""Of the JSON form; grows with every change that an older reader would misread."""

EXCLUDED = frozenset({Outcome.INFRA_ERROR, Outcome.ENV_ERROR, Outcome.CANCELLED})
"""Outcomes that say nothing about the policy."""

SOLVED_ABOVE = 0.5
"""A task is solved when its success component is above this; the same number as `rewards.success`
documents.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """What happened at one task; lists are over the rollouts that count, in order of the traces."""

    task_id: str
    """The task."""
    domain: str
    """Its family."""
    rewards: tuple[float | None, ...]
    """Weighted total per rollout; None where a failed agent left no reward, which is not 0."""
    successes: tuple[bool, ...]
    """Whether each rollout solved the task."""
    outcomes: tuple[str, ...]
    """How every rollout ended, those that do not count included."""
    components: Mapping[str, float]
    """Mean of each reward component over the rollouts that have it."""
    num_unscored: int
    """Completed rollouts without a reward: excluded, and a fault of the set-up."""
    num_calls: float
    """Mean number of model calls of a rollout."""
    completion_tokens: float
    """Mean number of sampled tokens of a rollout."""
    latency_s: float | None
    """Mean wall time of a rollout; None when it was not recorded."""

    @property
    def num_counted(self) -> int:
        """Rollouts that say something about the policy."""
        return len(self.successes)

    @property
    def num_excluded(self) -> int:
        """Rollouts that do not count."""
        return len(self.outcomes) - self.num_counted


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainRow:
    """One line of the table per domain."""

    domain: str
    """Its name; empty where tasks name none."""
    num_tasks: int
    """Tasks with at least one rollout that counts."""
    pass1: stats.Interval
    """Share solved."""
    reward: stats.Interval
    """Mean reward."""
    completion_tokens: float
    """Mean sampled tokens of a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One policy version on one fixed set of tasks."""

    policy_version: str
    """`policy@version`."""
    split: Split
    """Where the tasks come from."""
    fingerprint: str
    """Of the tasks; only evaluations with equal ones can be compared."""
    success: str
    """Reward component that says whether a task is solved; empty means the total."""
    tasks: tuple[TaskResult, ...]
    """In order of task id."""
    label: str = ""
    """What the caller calls it: `base`, `sft`, `final`."""
    level: float = 0.95
    """Of every interval."""
    resamples: int = 10_000
    """Of the bootstrap."""
    seed: int = 0
    """Of the bootstrap."""

    @property
    def pass1(self) -> stats.Interval:
        """pass@1: the chance that one rollout solves a task, each task weighing the same."""
        return self._interval(self.tasks, _successes)

    @property
    def reward(self) -> stats.Interval:
        """Mean reward, over the rollouts that have one."""
        return self._interval(self.tasks, _rewards)

    @property
    def completion_tokens(self) -> float:
        """Mean sampled tokens of a rollout, each task weighing the same; NaN when nothing counts."""
        return _mean([task.completion_tokens for task in self.tasks if task.num_counted])

    @property
    def outcomes(self) -> Mapping[str, int]:
        """How often each outcome occurred, over all rollouts."""
        return dict(Counter(outcome for task in self.tasks for outcome in task.outcomes))

    @property
    def num_excluded(self) -> int:
        """Rollouts that do not count, because the infrastructure failed or no reward arrived."""
        return sum(task.num_excluded for task in self.tasks)

    @property
    def num_unscored(self) -> int:
        """Completed rollouts without a reward."""
        return sum(task.num_unscored for task in self.tasks)

    def domains(self) -> tuple[DomainRow, ...]:
        """The table per domain, hardest first (lowest pass@1, then by name)."""
        rows = []
        for domain in sorted({task.domain for task in self.tasks}):
            inside = [task for task in self.tasks if task.domain == domain and task.num_counted]
            rows.append(
                DomainRow(
                    domain=domain,
                    num_tasks=len(inside),
                    pass1=self._interval(inside, _successes),
                    reward=self._interval(inside, _rewards),
                    completion_tokens=_mean([task.completion_tokens for task in inside]),
                )
            )
        return tuple(sorted(rows, key=lambda row: (math.isnan(row.pass1.mean), row.pass1.mean, row.domain)))

    @property
    def hardest_domain(self) -> DomainRow | None:
        """The domain with the lowest pass@1; None when nothing counts."""
        rows = [row for row in self.domains() if row.num_tasks]
        return rows[0] if rows else None

    def sentence(self) -> str:
        """The result in one sentence for people."""
        solved, name = (
            self.pass1,
            f"{self.policy_version} ({self.label})" if self.label else self.policy_version,
        )
        if not solved.num_tasks:
            return f"{name}: no rollout counts, {self.num_excluded} excluded; look at their outcomes"
        excluded = f", {self.num_excluded} rollouts excluded" if self.num_excluded else ""
        return (
            f"{name} solves {100 * solved.mean:.1f} % of {solved.num_tasks} {self.split} tasks "
            f"({100 * solved.low:.1f} to {100 * solved.high:.1f}), mean reward {self.reward.mean:.3f}, "
            f"{self.completion_tokens:.1f} completion tokens{excluded}"
        )

    def to_json(self) -> dict[str, Any]:
        """The versioned form that JSON holds; `from_json` reads it back without loss."""
        tree: dict[str, Any] = json.loads(json.dumps({"schema": SCHEMA, **asdict(self)}, allow_nan=False))
        return tree

    @classmethod
    def from_json(cls, source: Mapping[str, Any] | str | bytes) -> "Evaluation":
        """Read the JSON form, parsed or as text. Raises RecordError for another schema, broken JSON and
        unknown or missing fields.
        """
        try:
            tree = json.loads(json.dumps(source) if isinstance(source, Mapping) else source)
            schema = tree.pop("schema", None)
        except (ValueError, AttributeError) as error:
            raise RecordError(
                f"an evaluation is not a JSON object: {error}; write it with to_json"
            ) from error
        if schema != SCHEMA:
            raise RecordError(
                f"an evaluation has schema {schema!r}, this version reads {SCHEMA}; upgrade Leyden"
            )
        _check_fields(cls, tree)
        tasks = []
        for task in tree.pop("tasks"):
            _check_fields(TaskResult, task)
            for name in ("rewards", "successes", "outcomes"):
                task[name] = tuple(task[name])
            tasks.append(TaskResult(**task))
        return cls(**tree, tasks=tuple(tasks))

    def _interval(
        self, tasks: Sequence[TaskResult], of: "Callable[[TaskResult], Sequence[float]]"
    ) -> stats.Interval:
        return stats.cluster_bootstrap(
            [of(task) for task in tasks], level=self.level, resamples=self.resamples, seed=self.seed
        )


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
    version: int | None = None,
    label: str = "",
    tasks: Sequence[Task] | None = None,
) -> Evaluation:
    """The evaluation of `policy` (default `config.learn.policy`) from the traces of one run over one split.

    `tasks` is what was to be evaluated: a task of it without any trace is kept as one without a rollout
    that counts, and a trace of another task is refused. Order of the traces does not matter, except for the
    order of several rollouts of one task.

    Raises RecordError for no traces, traces of several splits or policy versions or of another version than
    `version`, and two different tasks with one id.
    """
    if not traces:
        raise RecordError("no traces to evaluate; run the tasks of the split first")
    name = policy or config.learn.policy
    found = _only([_version(trace, name) for trace in traces], "policy versions")
    if version not in (None, found):
        raise RecordError(
            f"the traces are of {name}@{found}, not of {name}@{version}; read those of {version}"
        )
    by_task: dict[str, list[Trace]] = {task.id: [] for task in tasks or ()}
    asked = {task.id: task for task in tasks or ()}
    for trace in traces:
        task = trace.rollout.task
        if tasks is not None and task.id not in asked:
            raise RecordError(
                f"rollout {trace.rollout.id!r} is of task {task.id!r}, which was not to be evaluated"
            )
        if asked.setdefault(task.id, task) != task:
            raise RecordError(f"task id {task.id!r} stands for different tasks; give every task its own id")
        by_task.setdefault(task.id, []).append(trace)
    success = config.rewards.success
    return Evaluation(
        policy_version=f"{name}@{found}",
        split=_only([task.split for task in asked.values()], "splits"),
        fingerprint=fingerprint(asked.values()),
        success=success,
        tasks=tuple(_task_result(asked[task_id], by_task[task_id], success) for task_id in sorted(asked)),
        label=label,
        level=config.eval.level,
        resamples=config.eval.resamples,
        seed=config.run.seed,
    )


def successes(traces: Sequence[Trace], config: Config) -> list[bool]:
    """Whether each rollout that counts solved its task; infrastructure failures and unscored ones are left
    out.
    """
    counted, _ = _counted(traces, config.rewards.success)
    return [_solved(trace, config.rewards.success) for trace in counted]


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


def _percent(interval: stats.Interval) -> str:
    if not interval.num_tasks:
        return "none"
    return f"{100 * interval.mean:.1f} % ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def _decimal(interval: stats.Interval) -> str:
    return (
        f"{interval.mean:.3f} ({interval.low:.3f} to {interval.high:.3f})" if interval.num_tasks else "none"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _counted(traces: Sequence[Trace], success: str) -> tuple[list[Trace], int]:
    """(the traces that say something about the policy, number of completed ones without a reward)."""
    counted, num_unscored = [], 0
    for trace in traces:
        outcome = _outcome(trace)
        if outcome == Outcome.COMPLETED and _score(trace, success) is None:
            num_unscored += 1
        elif outcome not in EXCLUDED:
            counted.append(trace)
    return counted, num_unscored


def _solved(trace: Trace, success: str) -> bool:
    score = _score(trace, success)
    return score is not None and score > SOLVED_ABOVE


def _task_result(task: Task, traces: Sequence[Trace], success: str) -> TaskResult:
    counted, num_unscored = _counted(traces, success)
    durations = [trace.attempt.duration_s for trace in counted if trace.attempt.duration_s is not None]
    components = [_components(trace) for trace in counted]
    tokens = [sum(call.num_sampled for call in trace.calls) for trace in counted]
    return TaskResult(
        task_id=task.id,
        domain=task.domain,
        rewards=tuple(trace.rollout.reward for trace in counted),
        successes=tuple(_solved(trace, success) for trace in counted),
        outcomes=tuple(str(_outcome(trace)) for trace in traces),
        components={
            name: _mean([values[name] for values in components if name in values])
            for name in sorted({name for values in components for name in values})
        },
        num_unscored=num_unscored,
        num_calls=_mean([len(trace.calls) for trace in counted]) if counted else 0.0,
        completion_tokens=_mean(tokens) if counted else 0.0,
        latency_s=_mean(durations) if durations else None,
    )


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


def _score(trace: Trace, success: str) -> float | None:
    return _components(trace).get(success) if success else trace.rollout.reward


def _version(trace: Trace, policy: str) -> int:
    version = trace.rollout.policy_versions.get(policy)
    if version is None:
        raise RecordError(
            f"rollout {trace.rollout.id!r} names no version of policy {policy!r}, only "
            f"{sorted(trace.rollout.policy_versions)}; evaluate a policy that it used"
        )
    return version


def _check_fields(record: type, tree: Mapping[str, object]) -> None:
    known = {field.name for field in fields(record)}
    if set(tree) != known:
        raise RecordError(
            f"{record.__name__} lacks {sorted(known - set(tree))} and has unknown "
            f"{sorted(set(tree) - known)}; read it with the version that wrote it"
        )


def _only(values: Sequence[T], what: str) -> T:
    found = sorted(set(map(str, values)))
    if len(found) > 1:
        raise RecordError(f"traces of several {what} ({', '.join(found)}); evaluate one at a time")
    return values[0]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _successes(task: TaskResult) -> Sequence[float]:
    return [float(success) for success in task.successes]


def _rewards(task: TaskResult) -> Sequence[float]:
    return [reward for reward in task.rewards if reward is not None]
