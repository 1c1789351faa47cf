"""A/A simulations through the real gate: equal policies are called different at most as often as allowed."""

import math

import pytest
from benchmarks import calibration

from leyden.base.power import mcnemar_power


def allowed(alpha: float, num_pairs: int) -> float:
    """Three standard errors above the level: a calibrated gate is above it for one seed in 700; seeds are fixed."""
    return alpha + 3 * math.sqrt(alpha * (1 - alpha) / num_pairs)


def test_the_rate_of_single_samples_is_the_exact_one_of_the_test() -> None:
    rate = calibration.single(4000, 60, seed=1) / 4000
    exact = mcnemar_power(60, 0.25, 0.0, alpha=calibration.ALPHA)
    # The gate also asks that the interval excludes 0, which can only take answers away.
    assert exact - 0.015 < rate <= exact + 3 * math.sqrt(exact * (1 - exact) / 4000)
    assert exact <= calibration.ALPHA


@pytest.mark.parametrize("case", [calibration.several, calibration.versions])
def test_several_samples_and_several_versions_keep_the_level(case: "calibration.Case") -> None:
    assert case(300, 30, 2) / 300 <= allowed(calibration.ALPHA, 300)


def test_looks_that_spend_keep_the_level_and_looks_that_do_not_break_it() -> None:
    assert calibration.looks(1500, 100, 3, spend=True) / 1500 <= allowed(calibration.ALPHA, 1500)
    assert calibration.looks(1500, 100, 3, spend=False) / 1500 > calibration.ALPHA + 0.02
