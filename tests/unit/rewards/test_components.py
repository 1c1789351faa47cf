"""From components to a total."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.base.config import RewardsConfig
from leyden.base.errors import RecordError, VerifierError
from leyden.rewards.components import Total, check_rewards, reward_version

FINITE = st.floats(-1e6, 1e6)


def total(components: dict[str, Any], **config: Any) -> float:
    return Total(RewardsConfig(**config)).explain(components).total


def test_a_single_component_counts_with_weight_one() -> None:
    assert total({"reward": 0.25}) == 0.25


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(FINITE, FINITE), min_size=1))
def test_the_total_is_the_weighted_sum(parts: dict[str, tuple[float, float]]) -> None:
    values = {name: value for name, (value, _) in parts.items()}
    weights = {name: weight for name, (_, weight) in parts.items()}
    explanation = Total(RewardsConfig(weights=weights)).explain(values)
    assert explanation.total == pytest.approx(math.fsum(values[n] * weights[n] for n in values))
    assert sum(part.amount for part in explanation.parts) == explanation.total


def test_a_shut_gate_takes_a_component_out_and_the_explanation_says_so() -> None:
    config = {"weights": {"correct": 1.0, "short": 0.5}, "gates": {"short": "correct"}}
    assert total({"correct": 1.0, "short": 1.0}, **config) == 1.5
    assert total({"correct": 0.0, "short": 1.0}, **config) == 0.0
    text = Total(RewardsConfig(**config)).explain({"correct": 0.0, "short": 1.0}).text()
    assert text == "0 = correct 0 x 1 + short 1 x 0.5 (shut by correct)"


def test_the_range_is_applied_before_the_weight() -> None:
    config = {"weights": {"tokens": -0.5}, "clip": {"tokens": (0.0, 10.0)}}
    assert total({"tokens": 25.0}, **config) == -5.0


def test_a_component_without_weight_is_kept_and_counts_nothing() -> None:
    explanation = Total(RewardsConfig(weights={"a": 1.0})).explain({"a": 1.0, "b": 9.0})
    assert explanation.total == 1.0 and [part.name for part in explanation.parts] == ["a", "b"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), True, False, "1.0", None, np.bool_(True)])
def test_what_is_no_finite_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(RecordError, match="'correct'"):
        total({"correct": value})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"weights": {"corect": 1.0}}, "rewards.weights.corect.*components of this attempt: correct, safe"),
        (
            {"weights": {"safe": 1.0}, "gates": {"safe": "x"}},
            "rewards.gates.safe = 'x' needs the component 'x'",
        ),
        ({"weights": {"safe": 1.0}, "clip": {"x": (0, 1)}}, "rewards.clip.x"),
        ({}, "2 components .*and no weights"),
    ],
)
def test_a_setting_that_names_an_unknown_component_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(VerifierError, match=says):
        total({"correct": 1.0, "safe": 1.0}, **config)


def test_success_is_a_component_or_the_total_above_one_half() -> None:
    assert Total(RewardsConfig()).success({"reward": 0.6})
    assert not Total(RewardsConfig()).success({"reward": 0.5})
    named = Total(RewardsConfig(success="correct", weights={"correct": 0.1}))
    assert named.success({"correct": 1.0})
    with pytest.raises(VerifierError, match=r"rewards\.success = 'correct'"):
        named.success({"other": 1.0})


def test_an_empty_range_or_a_weight_without_end_is_refused() -> None:
    with pytest.raises(VerifierError, match="lower bound first"):
        check_rewards(RewardsConfig(clip={"a": (1.0, 0.0)}))
    with pytest.raises(RecordError, match=r"rewards\.weights\.a"):
        check_rewards(RewardsConfig(weights={"a": float("nan")}))


def test_the_version_changes_with_the_file_and_the_numbers_but_not_the_time_limit(tmp_path: Any) -> None:
    file = tmp_path / "verify.py"
    file.write_text("a")
    first = reward_version(RewardsConfig(), file)
    assert reward_version(RewardsConfig(timeout_s=1), file) == first
    assert reward_version(RewardsConfig(weights={"a": 2.0}), file) != first
    file.write_text("b")
    assert reward_version(RewardsConfig(), file) != first
