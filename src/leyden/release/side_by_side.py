"""Several policy versions on the same tasks: who is better, at which cost, and which to take.

Promises: every pair is compared by the gate, and the answers hold together (Holm): the chance that any of them is
false is at most `alpha`. The recommendation is the cheapest version with a gain over the reference that is not
separable from the best; where no gain is separable it is the reference, and that is said plainly. Costs that are
not known are None and named in a note. Runs nothing and reads no store.

The first method is the reference: what is in use, or the untrained model.

Letters of shapes: V = methods, N = tasks that count for all of them.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from leyden.base import power, stats
from leyden.base.errors import RecordError
from leyden.base.multiplicity import holm
from leyden.release import gate
from leyden.release.fronts import Array, Front, Ratio, cost_per_success, front
from leyden.release.pooling import spread
from leyden.release.results import Evaluation, TaskResult

AXES = ("tokens", "latency_s", "usd")
"""Costs of running a version, per rollout."""

HORIZON_TASKS = 1000
"""Tasks over which training is spread when no workload is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What it took to make a version, from the records of its run and of those before it."""

    minutes: float = 0.0
    """Wall time of steps."""
    tokens: int = 0
    """Tokens that calls of its rollouts read and sampled."""
    usd: float | None = None
    """Money for calls and the machine; None when nothing has a price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One policy version to be compared."""

    name: str
    """What people call it."""
    evaluation: Evaluation
    """Of its version."""
    training: Training = Training()
    """What it took to make it; the mean of its runs, where it stands for several."""
    runs: tuple[Evaluation, ...] = ()
    """The evaluations that were pooled, where it stands for several runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two methods compared."""

    first: str
    """Name of the one that `verdict` is about."""
    second: str
    """Name of the other."""
    verdict: gate.Comparison
    """Answer corrected for all pairs; its p-value is that of this pair alone."""
    adjusted_p: float
    """Holm's p-value over all pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method beside the others."""

    name: str
    """What people call it."""
    policy_version: str
    """`policy@version`."""
    pass1: stats.Interval
    """Share of tasks solved."""
    reward: stats.Interval
    """Mean reward."""
    axes: dict[str, stats.Interval]
    """Per cost of `AXES`: mean of a rollout; `num_tasks` is 0 where it is not known."""
    calls: float
    """Mean model calls of a rollout."""
    training: Training
    """What it took to make it."""
    added: stats.Interval | None
    """Success minus that of the reference; None for the reference itself."""
    per_success: Ratio | None
    """Cost per added success against the reference, in `SideBySide.unit`; None for the reference."""
    monthly_usd: stats.Interval | None
    """Money for a month of the workload; None without a workload or a price."""
    monthly_tokens: float | None
    """Tokens of a month of the workload; None without one."""
    monthly_added: stats.Interval | None
    """Tasks solved more than with the reference in a month; None without a workload and for the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """The whole comparison."""

    rows: tuple[Row, ...]
    """In the order given; the first is the reference."""
    pairs: tuple[Pair, ...]
    """Every later method against every earlier one."""
    fronts: tuple[Front, ...]
    """Per cost of `AXES` that is known for all."""
    alpha: float
    """Chance that any answer is false, at most."""
    level: float
    """Of intervals."""
    num_tasks: int
    """Tasks of the holdout."""
    num_common: int
    """Those that count for all methods: intervals of fronts and ratios rest on them."""
    unit: str
    """Of `per_success`: `usd` or `minutes`."""
    horizon_tasks: float
    """Tasks over which training is spread in `per_success`."""
    tasks_per_month: float | None
    """Workload in tasks; None when none was given."""
    recommended: str
    """Name of a method."""
    reason: str
    """Why, in plain words."""
    notes: tuple[str, ...]
    """What a reader should know: what cannot be shown, what is not known."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; an end that an interval does not have is None."""
        tree: dict[str, Any] = _plain(dataclasses.asdict(self))
        return tree


def side_by_side(methods: Sequence[Method], *, alpha: float = 0.05, calls_per_month: float = 0.0) -> SideBySide:
    """Compare `methods`; `alpha` is what this look at the holdout may spend, 0 when it is spent.

    Raises RecordError for less than two methods, a name that stands twice, and evaluations of different tasks,
    splits or success components.
    """
    _check(methods, calls_per_month)
    reference = methods[0].evaluation
    level = 1 - alpha if alpha > 0 else reference.level
    pairs = _pairs(methods, alpha)
    common = _common(methods)
    quality_VN = _values(methods, common, _success)
    tasks_per_month = calls_per_month / _calls(reference) if calls_per_month else None
    unit = "usd" if all(m.training.usd is not None for m in methods[1:]) and _known(methods, "usd") else "minutes"
    horizon = tasks_per_month or float(HORIZON_TASKS)
    rows = tuple(
        _row(methods, number, common, quality_VN, unit, horizon, tasks_per_month, level)
        for number in range(len(methods))
    )
    fronts = tuple(
        front(quality_VN, _values(methods, common, axis), axis=axis, resamples=reference.resamples, seed=reference.seed)
        for axis in AXES
        if common and _known(methods, axis)
    )
    recommended, reason = _recommend(rows, pairs, unit, horizon)
    return SideBySide(
        rows=rows,
        pairs=pairs,
        fronts=fronts,
        alpha=alpha,
        level=level,
        num_tasks=len(reference.tasks),
        num_common=len(common),
        unit=unit,
        horizon_tasks=horizon,
        tasks_per_month=tasks_per_month,
        recommended=recommended,
        reason=reason,
        notes=tuple(_notes(methods, pairs, alpha, len(common))),
    )


def _check(methods: Sequence[Method], calls_per_month: float) -> None:
    if len(methods) < 2:
        raise RecordError(f"{len(methods)} version to compare; name at least two, the first is the reference")
    names = [method.name for method in methods]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RecordError(f"{twice!r} is named twice; compare each version once")
    if not 0 <= calls_per_month < math.inf:
        raise RecordError(f"{calls_per_month} calls per month; give a number from 0 up")


def _pairs(methods: Sequence[Method], alpha: float) -> tuple[Pair, ...]:
    """Every pair by the gate; an answer stands only if Holm's correction leaves it."""
    found = [
        (later, earlier, gate.compare(later.evaluation, earlier.evaluation, level=1 - alpha))
        for number, later in enumerate(methods)
        for earlier in methods[:number]
    ]
    adjusted = holm([verdict.p_value for _, _, verdict in found])
    return tuple(
        Pair(
            first=later.name,
            second=earlier.name,
            verdict=verdict if p < alpha else replace(verdict, answer="not separable"),
            adjusted_p=p,
        )
        for (later, earlier, verdict), p in zip(found, adjusted, strict=True)
    )


def _row(
    methods: Sequence[Method],
    number: int,
    common: Sequence[int],
    quality_VN: Array,
    unit: str,
    horizon: float,
    tasks_per_month: float | None,
    level: float,
) -> Row:
    method, reference = methods[number], methods[0]
    found = replace(method.evaluation, level=level)
    added = ratio = None
    if number:
        resampling = {"level": level, "resamples": found.resamples, "seed": found.seed}
        gain_N = (quality_VN[number] - quality_VN[0]).tolist()
        single = all(_task(m, k).num_counted == 1 for m in (method, reference) for k in common)
        added = stats.paired_interval(gain_N, binary=single, **resampling)  # type: ignore[arg-type]
        cost_VN = _values([reference, method], common, "usd") if unit == "usd" else np.zeros((2, len(common)))
        fixed = (method.training.usd or 0.0) if unit == "usd" else method.training.minutes
        if common:
            ratio = cost_per_success(
                gain_N,
                (cost_VN[1] - cost_VN[0]).tolist(),
                fixed,
                horizon=horizon,
                **resampling,  # type: ignore[arg-type]
            )
    axes = {"tokens": _tokens_interval(found), "latency_s": found.mean_of("latency_s"), "usd": found.mean_of("usd")}
    month = tasks_per_month
    return Row(
        name=method.name,
        policy_version=found.policy_version,
        pass1=found.pass1,
        reward=found.reward,
        axes=axes,
        calls=_calls(found),
        training=method.training,
        added=added,
        per_success=ratio,
        monthly_usd=_times(axes["usd"], month) if month and axes["usd"].num_tasks else None,
        monthly_tokens=axes["tokens"].mean * month if month and axes["tokens"].num_tasks else None,
        monthly_added=_times(added, month) if month and added is not None else None,
    )


def _recommend(rows: Sequence[Row], pairs: Sequence[Pair], unit: str, horizon: float) -> tuple[str, str]:
    """(name, reason): the cheapest of those with a gain over the reference that the best does not beat."""
    answers: dict[tuple[str, str], str] = {}
    for pair in pairs:
        opposite = {"better": "worse", "worse": "better"}.get(pair.verdict.answer, pair.verdict.answer)
        answers[(pair.first, pair.second)] = pair.verdict.answer
        answers[(pair.second, pair.first)] = opposite
    reference = rows[0]
    best = max(rows, key=lambda row: -math.inf if math.isnan(row.pass1.mean) else row.pass1.mean)
    gained = [row for row in rows[1:] if answers[(row.name, reference.name)] == "better"]
    if not gained:
        separable = any(pair.verdict.answer != "not separable" for pair in pairs)
        what = "No version is separable from any other" if not separable else "No version is separably better"
        than = "" if not separable else f" than {reference.name}"
        return reference.name, (
            f"{what}{than} on these tasks, so nothing was shown to be worth its cost: keep {reference.name}. That is "
            "not a proof that all are equal."
        )
    level_with = [row for row in gained if row is best or answers[(best.name, row.name)] != "better"]
    chosen = min(level_with or gained, key=lambda row: _price(row, unit, horizon))
    measure = "training and running cost" if unit == "usd" else "training time, then tokens per rollout"
    reason = (
        f"{chosen.name} is better than {reference.name} and the cheapest (by {measure}) of the "
        f"{len(level_with or gained)} whose gain is not separable from the best."
    )
    if chosen is not best:
        pair = next(p for p in pairs if {p.first, p.second} == {chosen.name, best.name})
        behind = pair.verdict.high if pair.first == best.name else -pair.verdict.low
        reason += (
            f" The best by mean is {best.name}; {chosen.name} may be up to {100 * max(0.0, behind):.1f} points behind."
        )
    elif len(gained) == 1:
        reason = f"{chosen.name} is the only version that is better than {reference.name}."
    return chosen.name, reason


def _price(row: Row, unit: str, horizon: float) -> tuple[float, float, float]:
    tokens = row.axes["tokens"].mean
    if unit == "usd":
        return (row.training.usd or 0.0) + horizon * row.axes["usd"].mean, tokens, -row.pass1.mean
    return row.training.minutes, tokens, -row.pass1.mean


def _notes(methods: Sequence[Method], pairs: Sequence[Pair], alpha: float, num_common: int) -> list[str]:
    said = []
    evaluations = [method.evaluation for method in methods]
    num_tasks = len(evaluations[0].tasks)
    if alpha <= 0:
        said.append("The planned looks at this holdout are used up (eval.looks), so nothing can be claimed on it.")
    elif power.smallest_p(num_tasks) * len(pairs) >= alpha:
        said.append(
            f"{num_tasks} tasks with {len(pairs)} pairs cannot show any difference: even if one version won every "
            f"task, p would be {min(1.0, power.smallest_p(num_tasks) * len(pairs)):.2g}, which is not below "
            f"{alpha:.3g}. Use at least {power.fewest_tasks(alpha / len(pairs))} tasks."
        )
    elif all(pair.verdict.answer == "not separable" for pair in pairs):
        shown = [pair.verdict.detectable for pair in pairs if pair.verdict.detectable is not None]
        least = f"; they show a difference of {100 * min(shown):.1f} points or more four times in five" if shown else ""
        said.append(f"Nothing is separable on {num_tasks} tasks{least}.")
    said += [spread(method.name, method.runs, evaluations[0]) for method in methods if method.runs]
    if num_common < num_tasks:
        said.append(
            f"{num_tasks - num_common} tasks have no rollout that counts in some version; fronts and costs per success "
            "rest on the others."
        )
    lost = [(method.evaluation.num_excluded, method.name) for method in methods]
    said += [f"{count} rollouts of {name} do not count." for count, name in lost if count]
    asked = {str(sorted(e.sampling.items())) if e.sampling is not None else "not recorded" for e in evaluations}
    if len(asked) > 1:
        said.append(
            "The versions were sampled differently (temperature, top_p or max_tokens of [policies.NAME.eval]), which "
            "may explain a difference."
        )
    if not _known(methods, "usd"):
        said.append(
            "Money per rollout is not known for every version: its calls recorded none, and its policy has no price. "
            "Set policies.NAME.usd_per_million for your own engine."
        )
    if not _known(methods, "tokens"):
        said.append("An evaluation was recorded before prompt tokens were kept, so tokens are not compared.")
    return said


def _common(methods: Sequence[Method]) -> list[int]:
    """Positions of the tasks with a rollout that counts in every evaluation."""
    return [k for k in range(len(methods[0].evaluation.tasks)) if all(_task(m, k).num_counted for m in methods)]


def _task(method: Method, position: int) -> TaskResult:
    return method.evaluation.tasks[position]


def _success(task: TaskResult) -> float:
    return sum(task.successes) / task.num_counted


def _cost(task: TaskResult, axis: str) -> float | None:
    if axis == "tokens":
        return None if task.prompt_tokens is None else task.prompt_tokens + task.completion_tokens
    return task.latency_s if axis == "latency_s" else task.usd


def _known(methods: Sequence[Method], axis: str) -> bool:
    return all(_cost(_task(m, k), axis) is not None for m in methods for k in _common(methods))


def _values(methods: Sequence[Method], common: Sequence[int], what: Any) -> Array:
    """A number per method and common task; shape (V, N)."""
    of = what if callable(what) else lambda task: _cost(task, what)
    return np.array([[of(_task(method, k)) for k in common] for method in methods], float).reshape(len(methods), -1)


def _tokens_interval(found: Evaluation) -> stats.Interval:
    costs = [_cost(task, "tokens") for task in found.tasks if task.num_counted]
    values = [[cost] for cost in costs if cost is not None]
    return stats.cluster_bootstrap(values, level=found.level, resamples=found.resamples, seed=found.seed)


def _calls(found: Evaluation) -> float:
    """Mean model calls of a rollout, at least 1 where nothing counts: it divides a workload."""
    counts = [task.num_calls for task in found.tasks if task.num_counted]
    return max(1e-9, math.fsum(counts) / len(counts)) if counts else 1.0


def _times(interval: stats.Interval, factor: float) -> stats.Interval:
    return replace(interval, mean=interval.mean * factor, low=interval.low * factor, high=interval.high * factor)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
