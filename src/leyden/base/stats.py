"""Statistics of evaluations: intervals, paired tests, and what a holdout of a given size can show.

Promises: the task is the unit of sampling everywhere, so several rollouts of one task never count as
several tasks; every function is deterministic in its arguments (randomness comes from `seed`); memory of
resampling is bounded whatever the number of resamples. Does not correct for several looks at the same holdout
(`leyden.release.holdout` counts those), and an interval does not cover the choice of tasks by a person.

scipy is imported where it is needed, so that `import leyden` stays light.

Letters of shapes: N = tasks, B = resamples of one chunk.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from leyden.base.errors import RecordError

_CHUNK_ENTRIES = 1 << 20
"""Entries of one chunk of resamples: 8 MiB of indices, small beside any model."""

_FEW = 10
"""With fewer tasks than this away from the commonest value, resampled means take so few values that the
bootstrap is too narrow (it is [0, 0] for 0 of n); the closed forms below hold there."""

_MAX_DENOMINATOR = 64
"""Largest common denominator of differences for which the exact null distribution is looked for: task means
of up to 64 equal samples, and most mixtures of smaller ones."""

_MAX_CELLS = 20_000_000
"""Most additions of the exact permutation test (about 0.1 s); beyond it the test is sampled."""

_TIE = 1e-9
"""Sums that differ by less, relative to their size, count as equal: float rounding must not break ties."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    """Mean over tasks of the mean of each task; NaN when there is no task."""
    low: float
    """Lower end; -inf when one task of unbounded values says nothing about the spread."""
    high: float
    """Upper end; inf in the same case."""
    level: float
    """Coverage asked for, for example 0.95."""
    method: str
    """How it was made: `bootstrap`, `wilson`, `bonett-price`, `constant` or `none`."""
    num_tasks: int
    """Tasks that had a value."""


def cluster_bootstrap(
    values_by_task: Sequence[Sequence[float]], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Interval of the mean over tasks, by resampling whole tasks.

    `values_by_task` has one sequence per task; a task weighs 1 however many values it has, and a task without
    any is left out. Resampling whole tasks keeps the dependence inside a task (Davison and Hinkley 1997,
    3.8). The ends are expanded percentiles: the quantiles are taken at `Phi(t * sqrt(n / (n - 1)))` with
    Student's t for n - 1 degrees of freedom, which undoes the narrowness of plain percentiles for few tasks
    (Hesterberg 2015, "What Teachers Should Know About the Bootstrap").

    Where resampling cannot work, a closed form is used and named in `method`: values of 0 and 1 where fewer
    than 10 tasks depart from the commonest value (one value per task), or where all values are equal, get
    Wilson's score interval with n = tasks, so 0 of n is not [0, 0]. Other values that are all equal have an
    interval of no width (`constant`): the data says nothing about their spread.

    Raises RecordError for a level outside (0, 1), less than 1 resample, or a value that is not finite.
    """
    _check(level, resamples)
    filled = [values for values in values_by_task if len(values)]
    means_N = _finite([math.fsum(values) / len(values) for values in filled])
    num_tasks = len(means_N)
    binary = all(value in (0.0, 1.0) for values in filled for value in values)
    single = all(len(values) == 1 for values in filled)
    if num_tasks and binary and (_same(means_N) or (single and _num_away(means_N) < _FEW)):
        return wilson(min(num_tasks, math.fsum(means_N)), num_tasks, level=level)
    return _resampled(means_N, level=level, resamples=resamples, seed=seed)


def paired_interval(
    differences_N: Sequence[float],
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
    binary: bool = False,
) -> Interval:
    """Interval of the mean of one difference per task (candidate minus incumbent).

    `binary` says that each difference is one 0/1 sample minus another. Then, with fewer than 10 tasks away
    from the commonest of -1, 0 and 1, the adjusted interval of Bonett and Price (2012, "Adjusted Wald
    Confidence Interval for a Difference of Binomial Proportions Based on Paired Data") replaces the
    bootstrap, so that no discordant task at all does not give [0, 0]. Otherwise as `cluster_bootstrap`.

    Raises RecordError as `cluster_bootstrap`, and for a binary difference other than -1, 0 and 1.
    """
    _check(level, resamples)
    means_N = _finite(differences_N)
    if binary:
        if not np.isin(means_N, (-1.0, 0.0, 1.0)).all():
            odd = next(value for value in means_N if value not in (-1.0, 0.0, 1.0))
            raise RecordError(f"difference {odd} is not -1, 0 or 1; pass binary=False")
        if len(means_N) and _num_away(means_N) < _FEW:
            return _bonett_price(means_N, level)
    return _resampled(means_N, level=level, resamples=resamples, seed=seed)


def wilson(successes: float, total: int, *, level: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion (Wilson 1927); never empty, inside [0, 1].

    `successes` may be fractional: a sum of task means. Raises RecordError unless 0 <= successes <= total
    and total > 0.
    """
    _check(level)
    if total < 1 or not 0 <= successes <= total:
        raise RecordError(f"{successes} successes of {total}; give a total above 0 and successes within it")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    share = successes / total
    shrink = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # Rounding may leave 1e-17 where the closed form is exactly 0 or 1.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == total else min(1.0, centre + half)
    return Interval(mean=share, low=low, high=high, level=level, method="wilson", num_tasks=total)


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples solves a task, from n samples of it.

    `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021): the share of all k-subsets of the n samples that hold a solved
    one. Raises RecordError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_solved <= num_samples:
        raise RecordError(
            f"pass@{k} of {num_solved} solved among {num_samples} samples; k lies between 1 and the samples of a task: "
            "raise eval.samples, or ask for a smaller k"
        )
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def mcnemar_exact(num_won: int, num_lost: int) -> float:
    """Two-sided exact p-value of McNemar's test on discordant pairs; 1 when there are none.

    `min(1, 2 P(X <= min(won, lost)))`, X binomial with won + lost trials and probability 1/2, in whole
    numbers until the last division. Raises RecordError for negative counts.
    """
    if num_won < 0 or num_lost < 0:
        raise RecordError(f"{num_won} won and {num_lost} lost; counts cannot be negative")
    num_won, num_lost = int(num_won), int(num_lost)  # numpy's integers overflow at 2^63
    trials = num_won + num_lost
    ways = tail = 1
    for successes in range(1, min(num_won, num_lost) + 1):
        ways = ways * (trials - successes + 1) // successes
        tail += ways
    return min(1.0, float(2 * tail / 2**trials))


def sign_flip_permutation(differences_N: Sequence[float], *, resamples: int = 10_000, seed: int = 0) -> float:
    """Two-sided p-value of "the mean difference is 0", by flipping the sign of each task's difference.

    Under the hypothesis that candidate and incumbent are exchangeable on each task all 2^n sign patterns are
    equally likely (Fisher 1935). Exact, by convolution, when the differences share a denominator of at most
    64, as means of a few 0/1 samples do. Otherwise sampled, as `(1 + hits) / (1 + resamples)`, which keeps
    the test valid (Phipson and Smyth 2010); such a p-value is never below 1 / (1 + resamples).

    Raises RecordError for a value that is not finite or less than 1 resample.
    """
    _check(0.5, resamples)
    moved_N = _finite(differences_N)
    moved_N = moved_N[moved_N != 0]
    if not len(moved_N):
        return 1.0
    whole_N = _on_lattice(moved_N)
    if whole_N is not None and len(whole_N) * 2 * int(np.abs(whole_N).sum()) <= _MAX_CELLS:
        return _flips_exact(whole_N)
    return _flips_sampled(moved_N, resamples, seed)


def minimum_detectable_effect(num_tasks: int, discordant: float, *, level: float = 0.95, power: float = 0.8) -> float:
    """Smallest difference of two success rates, 0 to 1, that McNemar's test finds with probability `power`.

    `discordant` is the share of tasks on which the two policies disagree. Solves Miettinen's (1968) sample
    size `n d^2 = (z_a sqrt(s) + z_b sqrt(s - d^2))^2`; where d would exceed s, s is raised to d, because a
    difference needs that many disagreements. An approximation: the exact test needs a little more. inf when
    not even a difference of 1 can be found with so few tasks.

    Raises RecordError for num_tasks < 1, or shares, level or power out of range.
    """
    _check(level)
    if num_tasks < 1 or not 0 <= discordant <= 1 or not 0.5 <= power < 1:
        raise RecordError(
            f"num_tasks {num_tasks}, discordant {discordant}, power {power}; "
            "give at least 1 task, a share from 0 to 1 and a power from 0.5 to 1"
        )
    z_test = NormalDist().inv_cdf(0.5 + level / 2)
    z_power = NormalDist().inv_cdf(power)

    def found(effect: float) -> bool:
        share = max(discordant, effect)
        needed = z_test * math.sqrt(share) + z_power * math.sqrt(share - effect * effect)
        return num_tasks * effect * effect >= needed * needed

    return _smallest(found) if found(1.0) else math.inf


def minimum_detectable_shift(num_tasks: int, deviation: float, *, level: float = 0.95, power: float = 0.8) -> float:
    """Smallest mean difference that a paired test finds with probability `power`, in the unit of `deviation`.

    `deviation` is the standard deviation of the differences per task: `(z_a + z_b) deviation / sqrt(n)`.
    """
    _check(level)
    if num_tasks < 1 or deviation < 0 or not 0.5 <= power < 1:
        raise RecordError(
            f"num_tasks {num_tasks}, deviation {deviation}, power {power}; "
            "give at least 1 task, a deviation of at least 0 and a power from 0.5 to 1"
        )
    normal = NormalDist()
    return (normal.inv_cdf(0.5 + level / 2) + normal.inv_cdf(power)) * deviation / math.sqrt(num_tasks)


def _smallest(found: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def _check(level: float, resamples: int = 1) -> None:
    if not 0 < level < 1:
        raise RecordError(f"level {level} is not between 0 and 1; use 0.95 for 95 percent")
    if resamples < 1:
        raise RecordError(f"{resamples} resamples; use at least 1, better 10000")


def _finite(values_N: Sequence[float]) -> NDArray[np.float64]:
    array_N = np.asarray(values_N, dtype=np.float64).reshape(-1)
    if not np.isfinite(array_N).all():
        position = int(np.flatnonzero(~np.isfinite(array_N))[0])
        raise RecordError(f"value {position} is {array_N[position]}; leave out what is not finite, and count it")
    return array_N


def _same(means_N: NDArray[np.float64]) -> bool:
    return bool(np.ptp(means_N) <= _TIE * (1 + abs(float(means_N[0]))))


def _num_away(means_N: NDArray[np.float64]) -> int:
    _, counts = np.unique(means_N, return_counts=True)
    return len(means_N) - int(counts.max())


def _bonett_price(differences_N: NDArray[np.float64], level: float) -> Interval:
    num_tasks = len(differences_N)
    z = NormalDist().inv_cdf(0.5 + level / 2)
    won = (int((differences_N > 0).sum()) + 1) / (num_tasks + 2)
    lost = (int((differences_N < 0).sum()) + 1) / (num_tasks + 2)
    half = z * math.sqrt((won + lost - (won - lost) ** 2) / (num_tasks + 2))
    mean = float(differences_N.mean())
    low, high = max(-1.0, won - lost - half), min(1.0, won - lost + half)
    # The adjustment pulls the centre towards 0, so near -1 and 1 the observed mean may lie outside.
    low, high = min(low, mean), max(high, mean)
    return Interval(mean=mean, low=low, high=high, level=level, method="bonett-price", num_tasks=num_tasks)


def _resampled(means_N: NDArray[np.float64], *, level: float, resamples: int, seed: int) -> Interval:
    num_tasks = len(means_N)
    if not num_tasks:
        return Interval(mean=math.nan, low=-math.inf, high=math.inf, level=level, method="none", num_tasks=0)
    mean = math.fsum(means_N) / num_tasks
    if num_tasks == 1:
        return Interval(mean=mean, low=-math.inf, high=math.inf, level=level, method="none", num_tasks=1)
    if _same(means_N):
        return Interval(mean=mean, low=mean, high=mean, level=level, method="constant", num_tasks=num_tasks)
    from scipy.special import stdtrit

    rng = np.random.default_rng(seed)
    resampled = np.empty(resamples)
    chunk = max(1, _CHUNK_ENTRIES // num_tasks)
    for start in range(0, resamples, chunk):
        stop = min(resamples, start + chunk)
        picks_BN = rng.integers(0, num_tasks, size=(stop - start, num_tasks))
        resampled[start:stop] = means_N[picks_BN].mean(axis=1)
    quantile_t = float(stdtrit(num_tasks - 1, 0.5 + level / 2))
    outer = NormalDist().cdf(quantile_t * math.sqrt(num_tasks / (num_tasks - 1)))
    low, high = np.quantile(resampled, (1 - outer, outer))
    return Interval(mean=mean, low=float(low), high=float(high), level=level, method="bootstrap", num_tasks=num_tasks)


def _on_lattice(moved_N: NDArray[np.float64]) -> NDArray[np.int64] | None:
    for denominator in range(1, _MAX_DENOMINATOR + 1):
        scaled_N = moved_N * denominator
        if np.abs(scaled_N - np.rint(scaled_N)).max() < _TIE * max(1.0, float(np.abs(scaled_N).max())):
            whole_N = np.rint(scaled_N).astype(np.int64)
            return whole_N // int(np.gcd.reduce(whole_N))
    return None


def _flips_exact(whole_N: NDArray[np.int64]) -> float:
    span = int(np.abs(whole_N).sum())
    chances = np.zeros(2 * span + 1)
    chances[span] = 1.0
    reach = 0
    for size in np.abs(whole_N).tolist():
        inner = chances[span - reach : span + reach + 1].copy()
        reach += size
        chances[span - reach : span + reach + 1] = 0.0
        chances[span - reach : span + reach + 1 - 2 * size] += 0.5 * inner
        chances[span - reach + 2 * size : span + reach + 1] += 0.5 * inner
    observed = abs(int(whole_N.sum()))
    if not observed:
        return 1.0
    return min(1.0, 2 * float(chances[span + observed :].sum()))


def _flips_sampled(moved_N: NDArray[np.float64], resamples: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    observed = abs(math.fsum(moved_N)) - _TIE * float(np.abs(moved_N).sum())
    hits = 0
    chunk = max(1, _CHUNK_ENTRIES // len(moved_N))
    for start in range(0, resamples, chunk):
        flips_BN = rng.integers(0, 2, size=(min(resamples - start, chunk), len(moved_N)), dtype=np.int8)
        # sum of s_i d_i with s = 2 f - 1
        sums_B = 2 * (flips_BN @ moved_N) - moved_N.sum()
        hits += int((np.abs(sums_B) >= observed).sum())
    return (1 + hits) / (1 + resamples)
