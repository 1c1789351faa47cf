"""Quality against cost: who is on the Pareto front, how surely, and what an added success costs.

Promises: tasks are resampled, and the same resample is used for every method and for quality and cost alike, so what
they share cancels; everything is deterministic in its arguments. Does not know what a cost is: any number per task
will do, and lower is better.

Letters of shapes: V = methods, N = tasks that count for all of them, B = resamples of one chunk.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leyden.base.errors import RecordError

Array = NDArray[np.float64]

_CHUNK_ENTRIES = 1 << 20
"""Entries of one chunk of resamples: 8 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The front of quality against one cost."""

    axis: str
    """What the cost is: `tokens`, `latency_s`, `usd`."""
    on_front: tuple[bool, ...]
    """Per method: whether no other is at least as good and as cheap, and better in one of both."""
    membership: tuple[float, ...]
    """Per method: share of resamples in which it is on the front."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A cost per added success with its interval."""

    value: float | None
    """None when nothing was added."""
    low: float | None
    """None when even the lower end is out of reach: hardly any resample adds a success."""
    high: float | None
    """None when it has no bound: some resamples add no success at all."""


def front(quality_VN: Array, cost_VN: Array, *, axis: str, resamples: int = 10_000, seed: int = 0) -> Front:
    """Who is on the front, and in which share of resamples of the tasks.

    Raises RecordError for shapes that differ, no task, and values that are not finite.
    """
    _check(quality_VN, cost_VN)
    num_tasks = quality_VN.shape[1]
    whole_BN = np.full((1, num_tasks), 1 / num_tasks)
    on_front = ~_dominated(whole_BN @ quality_VN.T, whole_BN @ cost_VN.T)[0]
    hits_V = np.zeros(len(quality_VN))
    for shares_BN in _resamples(num_tasks, resamples, seed):
        hits_V += (~_dominated(shares_BN @ quality_VN.T, shares_BN @ cost_VN.T)).sum(axis=0)
    return Front(axis=axis, on_front=tuple(map(bool, on_front)), membership=tuple((hits_V / resamples).tolist()))


def cost_per_success(
    gain_N: Sequence[float],
    extra_N: Sequence[float],
    fixed: float,
    *,
    horizon: float,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Ratio:
    """`(fixed + horizon * mean(extra)) / (horizon * mean(gain))` with a bootstrap interval over tasks.

    `gain_N` is the success of a method minus that of the reference per task, `extra_N` the same for its running
    cost, `fixed` what was paid once (training), `horizon` the number of tasks over which it is spread. A resample
    that adds no success costs infinitely much per success, so an interval whose upper end lies there has none.
    """
    gain_V, extra_V = np.asarray([gain_N], float), np.asarray([extra_N], float)
    _check(gain_V, extra_V)
    if horizon <= 0:
        raise RecordError(f"a horizon of {horizon} tasks; spread the cost over at least one")

    def ratios(shares_BN: Array) -> Array:
        gain_B, extra_B = shares_BN @ gain_V[0], shares_BN @ extra_V[0]
        added_B = np.where(gain_B > 1e-12, gain_B, 1.0) * horizon
        found: Array = np.where(gain_B > 1e-12, (fixed + horizon * extra_B) / added_B, math.inf)
        return found

    num_tasks = gain_V.shape[1]
    value = float(ratios(np.full((1, num_tasks), 1 / num_tasks))[0])
    all_B = np.sort(np.concatenate([ratios(s) for s in _resamples(num_tasks, resamples, seed)]))
    tail = (1 - level) / 2
    # Order statistics, not interpolation: between a number and infinity there is nothing to interpolate.
    low = float(all_B[min(len(all_B) - 1, math.floor(tail * len(all_B)))])
    high = float(all_B[max(0, math.ceil((1 - tail) * len(all_B)) - 1)])
    return Ratio(value=_finite(value), low=_finite(low), high=_finite(high))


def _dominated(quality_BV: Array, cost_BV: Array) -> NDArray[np.bool_]:
    """Whether some other method is at least as good and as cheap, and better in one; shape (B, V)."""
    # Means of the same numbers in another order differ by rounding, which must not decide.
    slack = 1e-12
    better_BVV = quality_BV[:, None, :] - quality_BV[:, :, None]
    cheaper_BVV = (cost_BV[:, :, None] - cost_BV[:, None, :]) / np.maximum(1.0, np.abs(cost_BV).max())
    beats_BVV = (better_BVV >= -slack) & (cheaper_BVV >= -slack) & ((better_BVV > slack) | (cheaper_BVV > slack))
    found: NDArray[np.bool_] = beats_BVV.any(axis=2)
    return found


def _resamples(num_tasks: int, resamples: int, seed: int) -> Iterator[Array]:
    """Share of each task in each resample; chunks of shape (B, N) whose rows sum to 1."""
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK_ENTRIES // num_tasks)
    for start in range(0, resamples, chunk):
        size = min(chunk, resamples - start)
        yield rng.multinomial(num_tasks, np.full(num_tasks, 1 / num_tasks), size=size) / num_tasks


def _check(quality_VN: Array, cost_VN: Array) -> None:
    if quality_VN.shape != cost_VN.shape or not quality_VN.size:
        raise RecordError(
            f"qualities of shape {quality_VN.shape} and costs of shape {cost_VN.shape}; give one of each per method "
            "and task, and at least one task"
        )
    if not (np.isfinite(quality_VN).all() and np.isfinite(cost_VN).all()):
        raise RecordError("a quality or a cost is not finite; leave out tasks where it is not known")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
