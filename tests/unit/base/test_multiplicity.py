"""Holm against its definition as a closed test, and alpha spending against its sum."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.base.errors import RecordError
from leyden.base.multiplicity import holm, spent_at

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=6)


def closed(p_values: list[float], position: int) -> float:
    """Holm is the closed test with Bonferroni: the largest p of all intersections that hold this hypothesis."""
    rest = [i for i in range(len(p_values)) if i != position]
    subsets = itertools.chain.from_iterable(itertools.combinations(rest, size) for size in range(len(rest) + 1))
    return max(min(1.0, (len(s) + 1) * min(p_values[i] for i in (*s, position))) for s in subsets)


@settings(deadline=None)
@given(P_VALUES)
def test_holm_is_the_closed_test_with_bonferroni(p_values: list[float]) -> None:
    expected = [closed(p_values, position) for position in range(len(p_values))]
    assert holm(p_values) == pytest.approx(expected)


@settings(deadline=None)
@given(P_VALUES)
def test_holm_never_lowers_a_p_value_nor_raises_it_above_bonferroni(p_values: list[float]) -> None:
    for raw, adjusted in zip(p_values, holm(p_values), strict=True):
        assert raw <= adjusted <= min(1.0, len(p_values) * raw) + 1e-12


def test_holm_of_nothing_is_nothing_and_of_no_probability_is_refused() -> None:
    assert holm([]) == []
    with pytest.raises(RecordError, match=r"1\.5"):
        holm([0.1, 1.5])


def test_among_true_null_hypotheses_holm_errs_at_most_as_often_as_allowed() -> None:
    uniform = np.random.default_rng(1).random((4000, 5))
    errs = sum(min(holm(row.tolist())) < 0.1 for row in uniform)
    assert 0.08 < errs / 4000 < 0.1 + 2 * (0.09 / 4000) ** 0.5


@settings(deadline=None)
@given(st.floats(0.001, 0.5), st.integers(1, 50))
def test_a_plan_shares_alpha_equally_and_claims_nothing_after_it(alpha: float, planned: int) -> None:
    assert sum(spent_at(look, alpha, planned) for look in range(1, planned + 1)) == pytest.approx(alpha)
    assert spent_at(planned + 1, alpha, planned) == 0


def test_without_a_plan_any_number_of_looks_spends_at_most_alpha() -> None:
    spent = [spent_at(look, 0.05) for look in range(1, 20_001)]
    assert spent[0] == 0.025 and sorted(spent, reverse=True) == spent
    # The sum telescopes: alpha (1 - 1 / (K + 1)).
    assert sum(spent) == pytest.approx(0.05 * (1 - 1 / 20_001))


@pytest.mark.parametrize("wrong", [(0, 0.05, 0), (1, 0.0, 0), (1, 1.0, 0), (1, 0.05, -1)])
def test_numbers_out_of_range_are_refused(wrong: tuple[int, float, int]) -> None:
    with pytest.raises(RecordError, match="look"):
        spent_at(*wrong)
