"""Power against brute force over every outcome and against closed forms."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from leyden.base import power
from leyden.base.errors import RecordError
from leyden.base.stats import mcnemar_exact


def brute_power(num_tasks: int, discordant: float, effect: float, alpha: float) -> float:
    """The same by adding up the probability of every (won, lost) whose p-value is below alpha."""
    won, lost = (discordant + effect) / 2, (discordant - effect) / 2
    total = 0.0
    for a in range(num_tasks + 1):
        for b in range(num_tasks + 1 - a):
            p_value = binomtest(a, a + b, 0.5).pvalue if a + b else 1.0
            if p_value < alpha:
                ways = math.comb(num_tasks, a) * math.comb(num_tasks - a, b)
                total += ways * won**a * lost**b * (1 - won - lost) ** (num_tasks - a - b)
    return total


@pytest.mark.parametrize(
    ("num_tasks", "discordant", "effect"), [(1, 0.5, 0.5), (9, 0.6, 0.4), (20, 0.3, 0.0), (25, 0.9, 0.35)]
)
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_power_is_the_probability_of_all_outcomes_that_reject(
    num_tasks: int, discordant: float, effect: float, alpha: float
) -> None:
    ours = power.mcnemar_power(num_tasks, discordant, effect, alpha=alpha)
    assert ours == pytest.approx(brute_power(num_tasks, discordant, effect, alpha), abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 200), st.floats(0.01, 1.0), st.sampled_from([0.01, 0.05, 0.1]))
def test_without_an_effect_the_exact_test_never_errs_more_than_allowed(n: int, share: float, alpha: float) -> None:
    assert power.mcnemar_power(n, share, 0.0, alpha=alpha) <= alpha


@settings(deadline=None)
@given(st.integers(0, 70), st.sampled_from([0.01, 0.05, 0.1, 0.25]))
def test_the_critical_count_is_the_last_that_rejects(num_discordant: int, alpha: float) -> None:
    critical = int(power._critical(num_discordant, alpha)[num_discordant])
    rejecting = [c for c in range(num_discordant // 2 + 1) if mcnemar_exact(c, num_discordant - c) < alpha]
    assert critical == (max(rejecting) if rejecting else -1)


def test_the_detectable_effect_is_where_power_crosses() -> None:
    found = power.detectable_effect(200, 0.3)
    assert power.mcnemar_power(200, 0.3, found) >= 0.8 > power.mcnemar_power(200, 0.3, found - 0.002)
    # Miettinen's approximation for 200 tasks and 30 % disagreement is 10.7 points; the exact test needs a little more.
    assert 0.105 < found < 0.125
    assert power.detectable_effect(3, 0.3) == math.inf


def test_needed_tasks_are_the_first_from_which_power_stays() -> None:
    found = power.needed_tasks(0.2, 0.3)
    assert found is not None
    above = [brute >= 0.8 for brute in (power.mcnemar_power(n, 0.3, 0.2) for n in range(1, found + 4))]
    first = next(n for n in range(1, found + 1) if all(above[n - 1 : n + 3]))
    assert found == first
    assert power.needed_tasks(0.001, 0.5) is None


def test_when_every_task_differs_power_has_a_closed_form() -> None:
    # All tasks discordant and all won: the test rejects iff 2^(1 - n) < alpha.
    assert [power.mcnemar_power(n, 1.0, 1.0) for n in (5, 6)] == [0.0, 1.0]
    assert power.fewest_tasks(0.05) == 6 and power.fewest_tasks(0.005) == 9
    n, won = 12, 0.8
    critical = max(c for c in range(7) if mcnemar_exact(c, n - c) < 0.05)
    expected = binom.cdf(critical, n, 1 - won) + binom.cdf(critical, n, won)
    assert power.mcnemar_power(n, 1.0, 2 * won - 1) == pytest.approx(expected)


def test_three_tasks_are_said_to_show_nothing() -> None:
    found = power.plan(3)
    assert found.hopeless and found.smallest_p == 0.25 and found.fewest_tasks == 6
    assert "3 tasks cannot show any difference" in found.sentences()[0] and "at least 6" in found.sentences()[0]


def test_a_plan_says_the_effect_found_and_the_tasks_needed_per_share() -> None:
    found = power.plan(100, effect=0.1, shares=(0.05, 0.3))
    assert [row.discordant for row in found.rows] == [0.1, 0.3]
    assert len(found.sentences()) == 2 and "10 points need" in found.sentences()[0]
    for row in found.rows:
        assert row.detectable is not None and row.needed is not None
        assert (row.detectable > 0.1) == (row.needed > 100)


@pytest.mark.parametrize("numbers", [(0, 0.05, 0.8), (5, 0.0, 0.8), (5, 1.0, 0.8), (5, 0.05, 0.4)])
def test_numbers_out_of_range_are_refused(numbers: tuple[int, float, float]) -> None:
    with pytest.raises(RecordError, match="power"):
        power.plan(numbers[0], alpha=numbers[1], power=numbers[2])
    with pytest.raises(RecordError, match="effect"):
        power.plan(5, effect=0.0)
    with pytest.raises(RecordError, match="raise the share"):
        power.mcnemar_power(5, 0.1, 0.2)
