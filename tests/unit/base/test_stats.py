import itertools
import math
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as reference

from leyden.base import stats
from leyden.base.errors import RecordError

signs = st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=12)
thirds = st.lists(st.integers(-3, 3).map(lambda value: value / 3), min_size=1, max_size=10)
reals = st.lists(st.floats(-5, 5, allow_nan=False).map(lambda value: round(value, 6)), min_size=1, max_size=9)


def every_flip(differences: Sequence[float]) -> float:
    """p-value from all 2^n sign patterns, the definition itself."""
    observed = abs(math.fsum(differences))
    sums = [
        abs(math.fsum(sign * value for sign, value in zip(pattern, differences, strict=True)))
        for pattern in itertools.product((-1, 1), repeat=len(differences))
    ]
    return sum(total >= observed - 1e-9 for total in sums) / len(sums)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_two_sided_binomial_test(num_won: int, num_lost: int) -> None:
    trials = num_won + num_lost
    expected = reference.binomtest(num_won, trials, 0.5).pvalue if trials else 1.0
    assert stats.mcnemar_exact(num_won, num_lost) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_of_61_won_and_12_lost() -> None:
    assert stats.mcnemar_exact(61, 12) == pytest.approx(reference.binomtest(12, 73).pvalue)
    assert stats.mcnemar_exact(3000, 3001) == pytest.approx(1.0)
    assert stats.mcnemar_exact(0, 10) == 2 / 2**10


@given(thirds)
@settings(deadline=None, max_examples=60)
def test_exact_permutation_is_the_share_of_sign_patterns_at_least_as_far(differences: list[float]) -> None:
    assert stats.sign_flip_permutation(differences) == pytest.approx(every_flip(differences), abs=1e-12)


@given(signs)
def test_sign_flips_of_single_binary_samples_are_mcnemar(differences: list[float]) -> None:
    expected = stats.mcnemar_exact(differences.count(1.0), differences.count(-1.0))
    assert stats.sign_flip_permutation(differences) == pytest.approx(expected, abs=1e-12)


@given(reals)
@settings(deadline=None, max_examples=25)
def test_sampled_permutation_comes_close_to_all_sign_patterns(differences: list[float]) -> None:
    irrational = [value * math.pi / 3 for value in differences]
    sampled = stats.sign_flip_permutation(irrational, resamples=20_000, seed=1)
    assert sampled == pytest.approx(every_flip(irrational), abs=0.02)


def test_a_sampled_p_value_is_never_zero() -> None:
    differences = [1 + math.sqrt(position) for position in range(60)]
    assert stats.sign_flip_permutation(differences, resamples=999) == 1 / 1000


def test_no_difference_anywhere_is_p_of_one() -> None:
    assert stats.sign_flip_permutation([0.0, 0.0]) == 1.0
    assert stats.sign_flip_permutation([]) == 1.0
    assert stats.mcnemar_exact(0, 0) == 1.0


@given(st.integers(1, 300).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_wilson_agrees_with_scipy(counts: tuple[int, int]) -> None:
    successes, total = counts
    expected = reference.binomtest(successes, total).proportion_ci(0.9, method="wilson")
    interval = stats.wilson(successes, total, level=0.9)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_none_of_n_and_all_of_n_do_not_have_an_interval_of_no_width() -> None:
    none = stats.cluster_bootstrap([[0.0]] * 60)
    every = stats.cluster_bootstrap([[1.0]] * 60)
    assert (none.low, none.method) == (0.0, "wilson") and 0.05 < none.high < 0.07
    assert every.high == 1.0 and every.low == pytest.approx(1 - none.high)
    assert stats.cluster_bootstrap([[0.0] * 8] * 60) == none, "eight samples of a task are not eight tasks"
    halves = stats.cluster_bootstrap([[0.0, 1.0]] * 60)
    assert halves.low < 0.4 < 0.6 < halves.high
    assert stats.cluster_bootstrap([[0.0]]).high > 0.7


def test_equal_values_that_are_no_proportion_say_so() -> None:
    interval = stats.cluster_bootstrap([[0.7], [0.7]])
    assert (interval.low, interval.high, interval.method) == (0.7, 0.7, "constant")


def test_one_task_says_nothing_about_the_spread_and_none_has_no_mean() -> None:
    one = stats.cluster_bootstrap([[0.7, 0.9]])
    assert one.mean == pytest.approx(0.8) and (one.low, one.high) == (-math.inf, math.inf)
    nothing = stats.cluster_bootstrap([[], []])
    assert math.isnan(nothing.mean) and nothing.num_tasks == 0


def test_a_task_weighs_one_however_many_samples_it_has() -> None:
    assert stats.cluster_bootstrap([[1.0] * 99 + [0.0], [0.2]]).mean == pytest.approx((0.99 + 0.2) / 2)


def test_repeating_every_sample_leaves_the_interval_as_it_is() -> None:
    values = [[float(value)] for value in np.random.default_rng(0).normal(size=40)]
    once = stats.cluster_bootstrap(values, resamples=500)
    often = stats.cluster_bootstrap([task * 7 for task in values], resamples=500)
    assert often.low == pytest.approx(once.low)


def test_equal_arguments_give_equal_intervals_in_any_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [[float(value)] for value in np.random.default_rng(0).normal(size=30)]
    whole = stats.cluster_bootstrap(values, resamples=1000, seed=3)
    assert stats.cluster_bootstrap(values, resamples=1000, seed=3) == whole
    monkeypatch.setattr(stats, "_CHUNK_ENTRIES", 30 * 7)
    assert stats.cluster_bootstrap(values, resamples=1000, seed=3) == whole


def test_for_a_normal_sample_the_interval_is_students() -> None:
    values = np.random.default_rng(5).normal(size=200)
    interval = stats.cluster_bootstrap([[float(value)] for value in values], resamples=20_000)
    expected = reference.t.interval(0.95, 199, values.mean(), values.std(ddof=1) / math.sqrt(200))
    assert (interval.low, interval.high) == pytest.approx(expected, abs=0.01)


def coverage(num_tasks: int, num_samples: int, rng: np.random.Generator, num_simulations: int) -> float:
    """How often the interval holds the true mean 0.3 of tasks whose success rates differ widely."""
    held = 0
    for simulation in range(num_simulations):
        rates = rng.beta(0.6, 1.4, size=num_tasks)
        values = (rng.random((num_tasks, num_samples)) < rates[:, None]).astype(float).tolist()
        interval = stats.cluster_bootstrap(values, resamples=400, seed=simulation)
        held += interval.low <= 0.3 <= interval.high
    return held / num_simulations


@pytest.mark.parametrize(("num_tasks", "num_samples"), [(12, 4), (60, 1), (60, 4)])
def test_the_interval_covers_as_often_as_it_says(num_tasks: int, num_samples: int) -> None:
    # 800 simulations have a standard error of 0.8 points at 95 %.
    assert 0.925 <= coverage(num_tasks, num_samples, np.random.default_rng(7), 800) <= 0.98


@pytest.mark.parametrize(("win", "loss"), [(0.02, 0.0), (0.05, 0.01), (0.25, 0.1), (0.97, 0.0)])
def test_the_paired_interval_covers_as_often_as_it_says(win: float, loss: float) -> None:
    rng = np.random.default_rng(11)
    held = 0
    for simulation in range(600):
        differences = rng.choice([1.0, -1.0, 0.0], size=60, p=[win, loss, 1 - win - loss])
        interval = stats.paired_interval(differences.tolist(), resamples=400, seed=simulation, binary=True)
        held += interval.low <= win - loss <= interval.high
    assert held / 600 >= 0.925


def test_no_discordant_task_still_leaves_room_for_a_difference() -> None:
    interval = stats.paired_interval([0.0] * 40, binary=True)
    assert interval.method == "bonett-price" and -0.1 < interval.low < 0 < interval.high < 0.1
    every = stats.paired_interval([1.0] * 40, binary=True)
    assert every.high == 1.0 and every.low < 0.97
    assert stats.paired_interval([1.0] * 20 + [0.0] * 20, binary=True).method == "bootstrap"


def test_the_minimum_detectable_effect_solves_the_sample_size_formula() -> None:
    z_test, z_power = reference.norm.ppf(0.975), reference.norm.ppf(0.8)
    for num_tasks, share in [(100, 0.3), (279, 0.2), (1000, 0.05)]:
        effect = stats.minimum_detectable_effect(num_tasks, share)
        needed = (z_test * math.sqrt(share) + z_power * math.sqrt(share - effect**2)) ** 2 / effect**2
        assert needed == pytest.approx(num_tasks, rel=1e-6)


def test_an_effect_of_the_detectable_size_is_found_about_as_often_as_promised() -> None:
    share, num_tasks = 0.3, 300
    effect = stats.minimum_detectable_effect(num_tasks, share)
    rng = np.random.default_rng(2)
    chances = [(share + effect) / 2, (share - effect) / 2, 1 - share]
    counts = rng.multinomial(num_tasks, chances, size=2000)
    found = np.mean([stats.mcnemar_exact(int(won), int(lost)) < 0.05 for won, lost, _ in counts])
    assert 0.74 <= found <= 0.84


def test_fewer_tasks_detect_only_larger_effects_and_very_few_detect_none() -> None:
    effects = [stats.minimum_detectable_effect(count, 0.2) for count in (10, 50, 200, 2000)]
    assert effects == sorted(effects, reverse=True)
    assert stats.minimum_detectable_effect(2, 0.2) == math.inf
    assert stats.minimum_detectable_shift(400, 2.0) == pytest.approx(2.8016 * 2 / 20, rel=1e-4)


@pytest.mark.parametrize(
    "call",
    [
        lambda: stats.cluster_bootstrap([[0.1, math.nan]]),
        lambda: stats.cluster_bootstrap([[0.1]], level=95),
        lambda: stats.cluster_bootstrap([[0.1]], resamples=0),
        lambda: stats.paired_interval([0.5], binary=True),
        lambda: stats.wilson(3, 2),
        lambda: stats.mcnemar_exact(-1, 2),
        lambda: stats.sign_flip_permutation([math.inf]),
        lambda: stats.minimum_detectable_effect(0, 0.1),
        lambda: stats.minimum_detectable_shift(5, -1.0),
    ],
)
def test_impossible_arguments_are_refused_with_the_value(call: object) -> None:
    assert callable(call)
    with pytest.raises(RecordError, match=r"\d|nan|inf"):
        call()


def test_importing_statistics_does_not_import_scipy() -> None:
    code = "import sys, leyden.base.stats; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_solved_sample(n: int, data: st.DataObject) -> None:
    solved, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * solved + [False] * (n - solved), k))
    assert stats.pass_at_k(n, solved, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_has_no_bias_where_the_naive_estimate_has() -> None:
    rate, n, k = 0.3, 6, 3
    ours = sum(math.comb(n, c) * rate**c * (1 - rate) ** (n - c) * stats.pass_at_k(n, c, k) for c in range(n + 1))
    assert ours == pytest.approx(1 - (1 - rate) ** k)


def test_pass_at_k_without_enough_samples_is_refused() -> None:
    for wrong in ((2, 1, 3), (2, 3, 1), (2, 1, 0)):
        with pytest.raises(RecordError, match=r"eval\.samples"):
            stats.pass_at_k(*wrong)


def test_mcnemar_of_numpy_counts_does_not_overflow() -> None:
    assert stats.mcnemar_exact(np.int64(120), np.int64(20)) == stats.mcnemar_exact(120, 20) > 0  # type: ignore[arg-type]
