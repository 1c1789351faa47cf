"""Numbers of a step report that are computed in it, against plain arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.traces.making import OUTCOMES, make_call, make_trace

from leyden.base import recipes
from leyden.base.config import Config, from_tree
from leyden.base.records import Reward, Trace
from leyden.learning import algorithms
from leyden.learning.credit import credit_groups
from leyden.step_report import MINOR_CREDIT, minor_credit
from leyden.traces.assemble import assemble

Groups = Sequence[Sequence[tuple[float, float]]]
"""(success, tokens) of each rollout of each group."""


def config_of(algorithm: str, weights: Mapping[str, float]) -> Config:
    return from_tree(
        {"learn": {"algorithm": algorithm}, "rewards": {"weights": dict(weights), "success": "correct"}},
        base_dir=Path("."),
    )


def traces_of(groups: Groups, weights: Mapping[str, float]) -> list[Trace]:
    traces = []
    for g, group in enumerate(groups):
        for i, values in enumerate(group):
            parts = dict(zip(("correct", "tokens"), values, strict=True))
            reward = sum(weights.get(name, 0.0) * value for name, value in parts.items())
            trace = make_trace(f"r{g}-{i}", calls=[make_call(f"c{g}-{i}")], reward=reward, group_id=f"g{g}")
            traces.append(replace(trace, rewards=[Reward(name=name, value=value) for name, value in parts.items()]))
    return traces


def share_of(algorithm: str, groups: Groups, weights: Mapping[str, float]) -> float | None:
    config, traces = config_of(algorithm, weights), traces_of(groups, weights)
    assembly = assemble(traces, policy="main", trainable_outcomes=OUTCOMES)
    credit = credit_groups(assembly, algorithms.make(config.learn, Path(".")))
    return minor_credit(config, traces, credit)


MIXED_AND_WRONG = ([(1.0, 20.0), (0.0, 20.0)], [(0.0, 10.0), (0.0, 30.0)])
SMALL = {"correct": 1.0, "tokens": -0.0005}


def test_algorithms_that_keep_sizes_follow_success_and_others_whatever_differs() -> None:
    # A half of a difference of 1 against a half of 20 * 0.0005, each twice.
    assert share_of("dr_grpo", MIXED_AND_WRONG, SMALL) == pytest.approx(0.01 / 1.01)
    assert share_of("grpo", MIXED_AND_WRONG, SMALL) == pytest.approx(0.5, abs=1e-3)
    assert share_of("dpo", MIXED_AND_WRONG, SMALL) == 0.5 > MINOR_CREDIT


@pytest.mark.parametrize("name", [*recipes.keeping_scale(), "grpo", "gspo", "cispo", "dapo", "dpo"])
def test_a_recipe_says_whether_a_small_difference_counts_like_a_large_one(name: str) -> None:
    share = share_of(name, MIXED_AND_WRONG, SMALL)
    assert share is not None and (share > 0.4) == recipes.RECIPES[name].scale_free != (share < 0.1)


def test_what_all_rollouts_of_a_group_have_in_common_is_no_difference() -> None:
    # The mean of the step gives all of a group that is wrong the same credit, which is about success.
    right_and_wrong = ([(1.0, 20.0), (1.0, 20.0)], [(0.0, 20.0), (0.0, 20.0)])
    assert share_of("reinforce_pp", right_and_wrong, SMALL) is None
    assert share_of("grpo", right_and_wrong, SMALL) is None


def test_with_one_part_of_the_reward_nothing_is_smaller() -> None:
    assert share_of("grpo", ([(0.25, 1.0), (0.5, 1.0)], [(0.0, 1.0), (1.0, 1.0)]), {"correct": 1.0}) == 0.0


values = st.tuples(st.sampled_from([0.0, 1.0]), st.integers(1, 50).map(float))


@given(st.lists(st.lists(values, min_size=2, max_size=5), min_size=1, max_size=5))
def test_it_is_the_sum_over_groups_of_equal_success_over_the_sum_over_all(groups: Groups) -> None:
    total = minor = 0.0
    for group in groups:
        rewards = [correct - 0.0005 * tokens for correct, tokens in group]
        differences = sum(abs(reward - sum(rewards) / len(rewards)) for reward in rewards)
        total += differences
        if all(correct == group[0][0] for correct, _ in group):
            minor += differences
    found = share_of("dr_grpo", groups, SMALL)
    if all(len(set(group)) == 1 for group in groups):
        assert found is None
    else:
        assert found == pytest.approx(minor / total, abs=1e-9)
