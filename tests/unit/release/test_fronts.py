"""The Pareto front and costs per success against plain loops."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.base.errors import RecordError
from leyden.release.fronts import cost_per_success, front

POINTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6)


def on_front(points: list[tuple[float, float]]) -> list[bool]:
    """By the definition: nobody else is as good and as cheap, and better in one."""
    return [
        not any(q >= quality and c <= cost and (q > quality or c < cost) for q, c in points) for quality, cost in points
    ]


@settings(deadline=None)
@given(POINTS)
def test_the_front_is_that_of_the_definition(points: list[tuple[int, int]]) -> None:
    quality = np.array([[q] * 3 for q, _ in points], float)
    cost = np.array([[c] * 3 for _, c in points], float)
    found = front(quality, cost, axis="tokens", resamples=20)
    assert list(found.on_front) == on_front([(float(q), float(c)) for q, c in points])
    # Tasks that are all alike give the same front in every resample.
    assert found.membership == tuple(map(float, found.on_front))


def test_membership_is_the_share_of_resamples_on_the_front() -> None:
    rng = np.random.default_rng(5)
    quality, cost = (rng.random((3, 12)) < 0.5).astype(float), rng.random((3, 12))
    found = front(quality, cost, axis="usd", resamples=4000, seed=1)
    picks = np.random.default_rng(9).integers(0, 12, size=(4000, 12))
    expected = np.mean([on_front([(quality[v, p].mean(), cost[v, p].mean()) for v in range(3)]) for p in picks], axis=0)
    # Two estimates of a share from 4000 draws each differ by less than 4 * sqrt(2 * 0.25 / 4000) = 0.045.
    assert np.abs(np.array(found.membership) - expected).max() < 0.045
    assert front(quality, cost, axis="usd", resamples=4000, seed=1) == found


def test_a_cost_per_success_is_training_and_running_cost_over_added_successes() -> None:
    found = cost_per_success([1.0] * 5 + [0.0] * 5, [0.02] * 10, 30.0, horizon=1000, resamples=2000)
    assert found.value == pytest.approx((30 + 1000 * 0.02) / (1000 * 0.5))
    assert found.low is not None and found.high is not None and found.low < 0.1 < found.high


def test_where_some_resamples_add_nothing_the_cost_has_no_upper_end() -> None:
    found = cost_per_success([1.0, 1.0, -1.0, 0.0], [0.0] * 4, 10.0, horizon=100, resamples=2000)
    assert found.value == pytest.approx(10 / 25) and found.low is not None and found.high is None
    none = cost_per_success([-1.0, 0.0, -1.0], [0.0] * 3, 10.0, horizon=100)
    assert (none.value, none.low, none.high) == (None, None, None)


def test_a_version_that_saves_money_has_a_negative_cost_per_success() -> None:
    found = cost_per_success([1.0] * 6, [-0.5] * 6, 1.0, horizon=10)
    for end in (found.value, found.low, found.high):
        assert end == pytest.approx(-0.4)


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RecordError, match="shape"):
        front(np.zeros((2, 3)), np.zeros((2, 4)), axis="usd")
    with pytest.raises(RecordError, match="at least one task"):
        front(np.zeros((2, 0)), np.zeros((2, 0)), axis="usd")
    with pytest.raises(RecordError, match="finite"):
        front(np.zeros((1, 1)), np.full((1, 1), math.nan), axis="usd")
    with pytest.raises(RecordError, match="horizon"):
        cost_per_success([1.0], [1.0], 1.0, horizon=0)
