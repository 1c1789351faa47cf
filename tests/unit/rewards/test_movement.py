"""Explaining the difference of two means, and weights that change."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.base.config import RewardsConfig, WeightSchedule, from_tree
from leyden.base.errors import ConfigError, VerifierError
from leyden.base.records import Attempt, Reward, Rollout, Task, Trace
from leyden.rewards.components import Explanation, Total, reward_version, weight_at
from leyden.rewards.movement import explanations, movement

VALUES = st.fixed_dictionaries({"correct": st.floats(-3, 3), "tokens": st.floats(0, 500), "safe": st.floats(-1, 1)})
CONFIG = RewardsConfig(
    weights={"correct": 1.0, "tokens": -0.001, "safe": 0.3}, gates={"correct": "safe"}, clip={"tokens": (0.0, 100.0)}
)
OTHER = RewardsConfig(weights={"correct": 2.0, "tokens": -0.01, "safe": 0.0}, gates={"tokens": "correct"})


def explained(rows: list[dict[str, float]], config: RewardsConfig) -> list[Explanation]:
    return [Total(config).explain(row) for row in rows]


@given(st.lists(VALUES, min_size=1, max_size=6), st.lists(VALUES, min_size=1, max_size=6), st.booleans())
def test_the_parts_add_up_to_the_difference_of_the_mean_totals(
    before: list[dict[str, float]], after: list[dict[str, float]], reweighed: bool
) -> None:
    then, now = explained(before, CONFIG), explained(after, OTHER if reweighed else CONFIG)
    found = movement(then, now)

    def mean(side: list[Explanation]) -> Fraction:
        return sum((Fraction(p.amount) for e in side for p in e.parts), Fraction(0)) / len(side)

    difference = float(mean(now) - mean(then))
    assert sum(part.difference for part in found.parts) == pytest.approx(difference, abs=1e-12, rel=1e-12)
    assert found.difference == pytest.approx(difference, abs=1e-12, rel=1e-9)
    assert found.before == pytest.approx(sum(e.total for e in then) / len(then), abs=1e-12)
    assert [abs(p.difference) for p in found.parts] == sorted((abs(p.difference) for p in found.parts), reverse=True)


def test_a_component_that_moved_is_named_first_with_its_share_of_open_gates() -> None:
    then = explained(
        [{"correct": 1.0, "tokens": 50.0, "safe": -1.0}, {"correct": 1.0, "tokens": 50.0, "safe": 1.0}], CONFIG
    )
    now = explained([{"correct": 1.0, "tokens": 60.0, "safe": 1.0}], CONFIG)
    found = movement(then, now)
    assert (found.parts[0].name, found.parts[0].difference) == ("correct", 0.5)
    assert (found.parts[0].open_before, found.parts[0].open_after) == (0.5, 1.0)
    assert found.text() == "+0.79 = correct +0.5, safe +0.3, tokens -0.01"


def test_a_component_of_one_side_only_counts_as_nothing_on_the_other() -> None:
    one = RewardsConfig(weights={"a": 1.0})
    two = RewardsConfig(weights={"a": 1.0, "b": 1.0})
    found = movement(explained([{"a": 1.0}], one), explained([{"a": 1.0, "b": 0.25}], two))
    assert found.text() == "+0.25 = b +0.25"
    with pytest.raises(ValueError, match="at least one"):
        movement([], [])


def test_explanations_come_from_traces_without_what_is_no_part_of_the_total() -> None:
    def trace(reward: float | None, *rewards: Reward) -> Trace:
        rollout = Rollout(id="r", task=Task(id="t"), reward=reward)
        attempt = Attempt(id="a", rollout_id="r", number=1, started_at=0.0)
        return Trace(rollout=rollout, attempt=attempt, calls=(), rewards=rewards)

    right = Reward(name="correct", value=1.0)
    beside = (Reward(name="canary", value=0.0, source="canary"), Reward(name="correct", value=0.0, source="human"))
    step = Reward(name="useful", value=9.0, call_id="c")
    config = RewardsConfig(weights={"correct": 2.0})
    assert [e.total for e in explanations([trace(2.0, right, *beside, step), trace(None)], config)] == [2.0]


@given(st.floats(-5, 5), st.floats(-5, 5), st.integers(0, 50), st.integers(1, 50), st.integers(0, 120))
def test_a_scheduled_weight_is_a_straight_line_between_its_ends(
    first: float, last: float, begin: int, length: int, step: int
) -> None:
    one = WeightSchedule(first=first, last=last, from_step=begin, to_step=begin + length)
    weight = weight_at(one, step)
    share = Fraction(min(max(step - begin, 0), length), length)
    assert weight == pytest.approx(float(Fraction(first) * (1 - share) + Fraction(last) * share), abs=1e-12)
    assert weight_at(one, begin) == first and weight_at(one, begin + length) == last == weight_at(one, None)


def test_the_total_uses_the_weight_of_the_step_and_evaluation_the_last() -> None:
    config = RewardsConfig(
        weights={"correct": 1.0}, schedule={"form": WeightSchedule(first=0.5, last=0.0, from_step=10, to_step=20)}
    )
    values = {"correct": 1.0, "form": 1.0}
    totals = [Total(config).explain(values, step).total for step in (0, 10, 15, 20, 99)]
    assert totals == [1.5, 1.5, 1.25, 1.0, 1.0]
    assert Total(config).explain(values).total == 1.0
    with pytest.raises(VerifierError, match=r"rewards.schedule.form needs the component 'form'"):
        Total(config).explain({"correct": 1.0}, 0)


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        ({"weights": {"a": 1}, "schedule": {"a": {"last": 1}}}, "keep one of the two"),
        ({"schedule": {"a": {"from_step": 5, "to_step": 5}}}, "let to_step be the later one"),
        ({"judge": {"policy": "main"}}, "must not judge itself"),
        ({"judge": {"policy": "j", "low": 1, "high": 1}}, "is not below"),
    ],
)
def test_contradictions_are_refused_when_the_file_is_read(rewards: dict[str, object], says: str) -> None:
    from pathlib import Path

    with pytest.raises(ConfigError, match=says):
        from_tree({"rewards": rewards}, base_dir=Path("."))


def test_the_version_of_a_reward_changes_with_whatever_decides_about_it() -> None:
    plain = RewardsConfig()
    same = reward_version(plain)
    assert same == reward_version(RewardsConfig(timeout_s=1, canary_share=0.5))
    changed = [
        RewardsConfig(settings={"exact": {"answer": "a"}}),
        RewardsConfig(schedule={"a": WeightSchedule(last=1.0)}),
        RewardsConfig(clip={"a": (0.0, 1.0)}),
    ]
    assert len({same, *map(reward_version, changed)}) == 4
