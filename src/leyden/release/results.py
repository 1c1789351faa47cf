"""The result of an evaluation as a record: task by task, with intervals, and a versioned JSON form.

Promises: the JSON form loses nothing and holds no NaN; an older schema is read, with None for what it did not
record; a newer one, unknown and missing fields are refused. How results come about stands in `evaluation`.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from leyden.base import stats
from leyden.base.errors import RecordError
from leyden.base.records import Split
from leyden.release.costs import Cost

SCHEMA = 2
"""Of the JSON form; grows with every change that an older reader would misread. 1 had no retries, wrong tool calls,
safety violations, prompt tokens, money, costs and sampling."""

PASS_AT = (1, 2, 4, 8, 16, 32)
"""The k of pass@k that are reported, as far as there are samples."""


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
    prompt_tokens: float | None = None
    """Mean number of tokens that a rollout's calls read; None when it was not recorded."""
    num_retries: float | None = None
    """Mean number of attempts of a rollout after its first; None when it was not recorded."""
    num_wrong_tool_calls: float | None = None
    """Mean number of tool calls of a rollout that their declaration does not allow; None when not recorded."""
    num_unsafe: int | None = None
    """Rollouts that violated the safety component; None when there is none, or it was not scored."""
    usd: float | None = None
    """Mean money for the calls of a rollout; None when no call has a price."""

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
    cost: Cost | None = None
    """Of all rollouts together, those that do not count included; None when it was not recorded."""
    wall_s: float | None = None
    """How long the evaluation took; None when it was not recorded."""
    sampling: Mapping[str, Any] | None = None
    """Sampling parameters asked for; None when they were not recorded."""
    safety: str = ""
    """Reward component that says whether a rollout was safe; empty means that nothing does."""

    @property
    def pass1(self) -> stats.Interval:
        """pass@1: the chance that one rollout solves a task, each task weighing the same."""
        return self._interval(self.tasks, _successes)

    @property
    def reward(self) -> stats.Interval:
        """Mean reward, over the rollouts that have one."""
        return self._interval(self.tasks, _rewards)

    def pass_at(self, k: int) -> stats.Interval:
        """pass@k by the unbiased estimator, over the tasks with at least k rollouts that count, each weighing the same.

        Raises RecordError for a k below 1, or when no task has k such rollouts.
        """
        estimates = [
            (stats.pass_at_k(task.num_counted, sum(task.successes), k),) for task in self.tasks if task.num_counted >= k
        ]
        if k < 1 or not estimates:
            raise RecordError(f"pass@{k} needs {max(1, k)} rollouts of a task that count; raise eval.samples")
        return stats.cluster_bootstrap(estimates, level=self.level, resamples=self.resamples, seed=self.seed)

    def pass_at_all(self) -> dict[int, stats.Interval]:
        """pass@k for the k of `PASS_AT` that every task with a rollout that counts has samples for."""
        fewest = min((task.num_counted for task in self.tasks if task.num_counted), default=0)
        return {k: self.pass_at(k) for k in PASS_AT if k <= fewest}

    def mean_of(self, name: str) -> stats.Interval:
        """Mean over tasks of a number of `TaskResult` (`latency_s`, `usd`, `num_retries`, ...), where it is known."""
        known = [getattr(task, name) for task in self.tasks if task.num_counted]
        values = [(float(value),) for value in known if value is not None]
        return stats.cluster_bootstrap(values, level=self.level, resamples=self.resamples, seed=self.seed)

    @property
    def unsafe(self) -> stats.Interval | None:
        """Share of rollouts that violated the safety component; None when nothing says so."""
        known = [task for task in self.tasks if task.num_unsafe is not None and task.num_counted]
        if not known:
            return None
        rates = [[1.0] * (task.num_unsafe or 0) + [0.0] * (task.num_counted - (task.num_unsafe or 0)) for task in known]
        return stats.cluster_bootstrap(rates, level=self.level, resamples=self.resamples, seed=self.seed)

    @property
    def completion_tokens(self) -> float:
        """Mean sampled tokens of a rollout, each task weighing the same; NaN when nothing counts."""
        return mean([task.completion_tokens for task in self.tasks if task.num_counted])

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
                    completion_tokens=mean([task.completion_tokens for task in inside]),
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
            raise RecordError(f"an evaluation is not a JSON object: {error}; write it with to_json") from error
        if schema == 1:
            tree = _from_first(tree)
        elif schema != SCHEMA:
            raise RecordError(f"an evaluation has schema {schema!r}, this version reads up to {SCHEMA}; upgrade Leyden")
        _check_fields(cls, tree)
        if tree["cost"] is not None:
            tree["cost"] = Cost.from_json(tree["cost"])
        tasks = []
        for task in tree.pop("tasks"):
            _check_fields(TaskResult, task)
            for name in ("rewards", "successes", "outcomes"):
                task[name] = tuple(task[name])
            tasks.append(TaskResult(**task))
        return cls(**tree, tasks=tuple(tasks))

    def _interval(self, tasks: Sequence[TaskResult], of: "Callable[[TaskResult], Sequence[float]]") -> stats.Interval:
        return stats.cluster_bootstrap(
            [of(task) for task in tasks], level=self.level, resamples=self.resamples, seed=self.seed
        )


def _from_first(tree: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation of schema 1 with None for what it did not record."""
    missing = ("prompt_tokens", "num_retries", "num_wrong_tool_calls", "num_unsafe", "usd")
    tasks = [{**task, **dict.fromkeys(missing)} for task in tree.get("tasks", ())]
    return {**tree, "tasks": tasks, "cost": None, "wall_s": None, "sampling": None, "safety": ""}


def _check_fields(record: type, tree: Mapping[str, object]) -> None:
    known = {field.name for field in fields(record)}
    if set(tree) != known:
        raise RecordError(
            f"{record.__name__} lacks {sorted(known - set(tree))} and has unknown "
            f"{sorted(set(tree) - known)}; read it with the version that wrote it"
        )


def _successes(task: TaskResult) -> Sequence[float]:
    return [float(success) for success in task.successes]


def _rewards(task: TaskResult) -> Sequence[float]:
    return [reward for reward in task.rewards if reward is not None]


def mean(values: Sequence[float]) -> float:
    """The mean, NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan
