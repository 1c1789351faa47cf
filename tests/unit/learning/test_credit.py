import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.traces.making import OUTCOMES, make_call, make_trace

from leyden.base.config import LearnConfig
from leyden.base.records import Drop, Outcome, Reward, Trace
from leyden.learning.algorithms import (
    ActorCritic,
    Algorithm,
    Discounted,
    Distill,
    GlobalRelative,
    GroupRelative,
    Preference,
    Sft,
    make,
    surrogate_of,
)
from leyden.learning.batch import Details
from leyden.learning.credit import (
    apply_credit,
    credit_alone,
    credit_groups,
    drop_flat,
    drop_unpaired,
    explained_variance,
    scored_groups,
)
from leyden.learning.evidence import Evidence, step_rewards
from leyden.traces.assemble import Assembly, assemble

rewards = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12)
GRPO = GroupRelative(name="grpo", divide_by_std=True)
DR_GRPO = GroupRelative(name="dr_grpo")
RLOO = GroupRelative(name="rloo", baseline="leave_one_out")
COMPARING: list[Algorithm] = [GRPO, DR_GRPO, RLOO]


def assembled(*traces: Trace) -> Assembly:
    return assemble(traces, policy="main", trainable_outcomes=OUTCOMES, max_tokens=50)


@given(rewards)
def test_each_formula_equals_its_definition_in_float64(values: list[float]) -> None:
    r = np.asarray(values, np.float64)
    if len(set(values)) == 1:
        expected = [np.zeros(len(r))] * 3
    else:
        others = np.asarray([np.delete(r, i).mean() for i in range(len(r))])
        expected = [(r - r.mean()) / (r.std(ddof=1) + 1e-6), r - r.mean(), r - others]
    for algorithm, reference in zip(COMPARING, expected, strict=True):
        assert algorithm.credit(values) == pytest.approx(reference, rel=1e-9, abs=1e-9)


@given(rewards)
def test_rloo_is_dr_grpo_times_n_over_n_minus_1(values: list[float]) -> None:
    num = len(values)
    scaled = [c * num / max(num - 1, 1) for c in DR_GRPO.credit(values)]
    assert RLOO.credit(values) == pytest.approx(scaled, rel=1e-12, abs=1e-12)


@given(rewards)
def test_comparison_has_zero_mean(values: list[float]) -> None:
    for algorithm in COMPARING:
        assert math.fsum(algorithm.credit(values)) == pytest.approx(0, abs=1e-9)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=8), st.integers(-1000, 1000))
def test_a_constant_added_to_all_rewards_changes_no_credit(values: list[int], shift: int) -> None:
    for algorithm in COMPARING:
        shifted = algorithm.credit([v + shift for v in values])
        assert shifted == pytest.approx(algorithm.credit(values), rel=1e-9, abs=1e-9)


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=8), st.floats(0.5, 1000))
def test_grpo_forgets_the_scale_of_rewards_up_to_eps(values: list[int], scale: float) -> None:
    scaled = GRPO.credit([scale * v for v in values])
    assert scaled == pytest.approx(GRPO.credit(values), rel=1e-5, abs=1e-5)


@given(rewards, st.randoms(use_true_random=False))
def test_a_permutation_of_the_rewards_permutes_the_credit_exactly(values: list[float], random: Any) -> None:
    order = list(range(len(values)))
    random.shuffle(order)
    for algorithm in [*COMPARING, Sft(min_reward=0.5)]:
        credit = algorithm.credit(values)
        assert algorithm.credit([values[i] for i in order]) == [credit[i] for i in order]


@pytest.mark.parametrize("values", [[1.0], [0.1] * 3, [-7.5, -7.5]])
def test_nothing_to_compare_gives_exactly_zero(values: list[float]) -> None:
    for algorithm in COMPARING:
        assert algorithm.credit(values) == [0.0] * len(values)


def test_imitation_is_one_at_or_above_the_threshold() -> None:
    assert Sft(min_reward=0.5).credit([0.49, 0.5, 1.0]) == [0.0, 1.0, 1.0]
    assert Sft().credit([-3.0, 0.0]) == [1.0, 1.0]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gspo", "cispo", "dapo", "rejection_sft"])
def test_an_algorithm_says_whether_it_pushes_away(name: str) -> None:
    algorithm = make(LearnConfig.model_validate({"algorithm": name}))
    assert algorithm.negative_credit == any(c < 0 for c in algorithm.credit([0.0, 1.0, 0.5]))


def test_imitation_is_likelihood_and_comparison_takes_the_configured_surrogate() -> None:
    config = LearnConfig.model_validate({"algorithm": "rejection_sft"})
    assert surrogate_of(config, make(config)) == "nll"
    config = LearnConfig.model_validate({"algorithm": "rloo", "surrogate": "ppo_clip"})
    assert surrogate_of(config, make(config)) == "ppo_clip"


def test_credit_is_given_before_tokens_are_dropped() -> None:
    traces = [
        make_trace("r0", calls=[make_call("a")], reward=1.0),
        make_trace("r1", calls=[make_call("b", prompt=range(99))], reward=0.0),  # overlong
        make_trace("r2", calls=[], reward=0.0),
        make_trace("r3", calls=[make_call("c", delivered=False)], reward=0.0),
    ]
    credit = credit_groups(assembled(*traces), DR_GRPO)
    assert credit.by_rollout == {"r0": 0.75, "r1": -0.25, "r2": -0.25, "r3": -0.25}
    assert (credit.num_survivors, credit.num_groups, credit.num_singletons) == (1, 1, 0)


def test_a_group_with_one_scored_rollout_gets_zero_not_its_raw_reward() -> None:
    traces = [
        make_trace("r0", calls=[make_call("a")], reward=1.0),
        make_trace("r1", calls=[make_call("b")], reward=1.0, outcome=Outcome.INFRA_ERROR),
        make_trace("r2", calls=[make_call("c")], reward=None),
    ]
    for algorithm in COMPARING:
        credit = credit_groups(assembled(*traces), algorithm)
        assert credit.by_rollout == {"r0": 0.0}
        assert (credit.num_singletons, credit.zero_variance_tasks) == (1, [])


def test_flat_groups_are_counted_by_task() -> None:
    traces = [
        make_trace(f"{group}-{k}", group_id=group, task_id=f"task-{group}", reward=value)
        for group, values in {"a": (1, 1), "b": (0, 1), "c": (0, 0)}.items()
        for k, value in enumerate(values)
    ]
    credit = credit_groups(assembled(*traces), GRPO)
    assert credit.zero_variance_tasks == ["task-a", "task-c"]
    assert credit.num_groups == 3 and credit.num_survivors == 0
    assert [group.rewards for group in credit.groups] == [[1, 1], [0, 1], [0, 0]]


def test_a_rollout_without_a_group_is_compared_with_nobody() -> None:
    traces = [make_trace(f"r{k}", group_id=None, reward=float(k)) for k in range(2)]
    credit = credit_groups(assembled(*traces), RLOO)
    assert (credit.num_groups, credit.num_singletons, credit.by_rollout) == (2, 2, {"r0": 0.0, "r1": 0.0})


def test_evaluation_rollouts_do_not_enter_a_group() -> None:
    traces = [make_trace("r0", reward=1.0), make_trace("r1", reward=0.0, mode="val")]
    assert credit_groups(assembled(*traces), RLOO).by_rollout == {"r0": 0.0}


def test_a_failed_outcome_is_compared_with_reward_zero() -> None:
    traces = [make_trace("r0", reward=1.0), make_trace("r1", reward=None, outcome=Outcome.TIMEOUT)]
    assert credit_groups(assembled(*traces), DR_GRPO).by_rollout == {"r0": 0.5, "r1": -0.5}


def test_rejected_rollouts_are_dropped_by_name_and_conserved() -> None:
    traces = [make_trace(f"r{k}", calls=[make_call(f"c{k}")], reward=k / 2) for k in range(3)]
    before = assembled(*traces)
    algorithm = Sft(min_reward=0.5)
    after = apply_credit(before, credit_groups(before, algorithm), algorithm)
    assert after.dropped == {Drop.BELOW_THRESHOLD: 2} and after.trained == 4
    assert [a.rollout_id for a in after.kept] == ["r1", "r2"]
    assert apply_credit(before, credit_groups(before, GRPO), GRPO) is before


@given(st.permutations(range(5)))
def test_the_order_of_traces_changes_no_credit(order: list[int]) -> None:
    traces = [make_trace(f"r{k}", group_id=f"g{k % 2}", reward=float(k)) for k in range(5)]
    expected = credit_groups(assembled(*traces), GRPO)
    found = credit_groups(assembled(*(traces[k] for k in order)), GRPO)
    assert found == replace(expected, by_rollout=found.by_rollout)
    assert dict(found.by_rollout) == dict(expected.by_rollout)


def test_calls_of_a_rollout_can_have_credit_of_their_own_and_choices_of_a_call_share_it() -> None:
    calls = [make_call("c0", completions=[(7,), (8, 9)]), make_call("c1", seq=1)]
    traces = [make_trace("r0", calls=calls, reward=1.0), make_trace("r1", reward=0.0)]
    assembly = assembled(*traces)
    credit = credit_groups(assembly, Discounted(gamma=0.5))
    assert credit.by_rollout == {"r0": 0.5, "r1": -0.5}
    assert {(a.call_id, a.choice_index): credit.of(a) for a in assembly.actions} == {
        ("c0", 0): 0.25,
        ("c0", 1): 0.25,
        ("c1", 0): 0.5,
    }


def test_the_reward_of_a_call_of_another_policy_counts_for_the_own_call_before_it() -> None:
    calls = [
        make_call("early", policy="other"),
        make_call("c0", seq=1),
        make_call("between", seq=2, policy="other"),
        make_call("c1", seq=3),
    ]
    trace = make_trace("r0", calls=calls, reward=1.0)
    values = {"early": 100.0, "c0": 1.0, "between": 2.0, "c1": 4.0}
    trace = replace(trace, rewards=[Reward(name="step", value=v, call_id=c) for c, v in values.items()])
    (group,) = scored_groups(assembled(trace), Evidence(step_rewards=step_rewards([trace], 10.0)))
    assert [(call.call_id, call.reward) for call in group.rollouts[0].calls] == [("c0", 30.0), ("c1", 40.0)]


def test_a_dropped_call_of_the_policy_still_counts_in_the_comparison() -> None:
    # The second call is overlong (99 tokens of at most 50): its reward still moves the credit of the first.
    calls = [make_call("c0"), make_call("c1", seq=1, prompt=range(99))]
    evidence = Evidence(step_rewards={"c1": 8.0})
    credit = credit_groups(assembled(make_trace("r0", calls=calls)), Discounted(gamma=0.5, step_rewards=True), evidence)
    assert credit.details.credit["r0", "c0", 0] == pytest.approx((0.0 - 4.0) + 0.5 * (8.0 - 4.0))


def test_groups_without_a_difference_are_dropped_by_name_when_they_are_replaced() -> None:
    traces = [
        make_trace(f"{g}{k}", group_id=g, calls=[make_call(f"{g}c{k}")], reward=float(v))
        for g, values in {"a": (1, 1), "b": (0, 1), "c": (1,)}.items()
        for k, v in enumerate(values)
    ]
    assembly = assembled(*traces)
    after, credit = drop_flat(assembly, credit_groups(assembly, GRPO))
    assert after.dropped == {Drop.FLAT_GROUP: 6} and after.trained == 4
    assert set(credit.by_rollout) == {"b0", "b1"}
    assert len(credit.zero_variance_tasks) == 1 and credit.num_singletons == 1, "the report still counts them"


def test_a_pair_that_lost_all_tokens_of_one_side_is_not_trained_and_counted() -> None:
    traces = [
        make_trace("r0", calls=[make_call("a")], reward=3.0),
        make_trace("r1", calls=[make_call("b")], reward=2.0),
        make_trace("r2", calls=[make_call("c")], reward=1.0),
        make_trace("r3", calls=[make_call("d", prompt=range(99))], reward=0.0),  # overlong
    ]
    before, algorithm = assembled(*traces), Preference()
    credit = credit_groups(before, algorithm)
    assembly = apply_credit(before, credit, algorithm)
    assembly, credit = drop_unpaired(assembly, credit)
    assert dict(credit.by_rollout) == {"r1": 1.0, "r2": -1.0}
    assert assembly.dropped == {Drop.OVERLONG: 2, Drop.UNPAIRED: 2} and assembly.trained == 4


def test_values_reach_the_critic_and_come_back_as_targets() -> None:
    trace = make_trace("r0", calls=[make_call("c0"), make_call("c1", seq=1)], reward=1.0)
    values = {("r0", "c0", 0): 0.5, ("r0", "c1", 0): 0.25}
    credit = credit_groups(assembled(trace), ActorCritic(gae_lambda=0.0), Evidence(values=values))
    assert credit.details.value == values
    assert credit.details.credit == {("r0", "c0", 0): -0.25, ("r0", "c1", 0): 0.75}
    assert credit.details.target == {("r0", "c0", 0): 0.25, ("r0", "c1", 0): 1.0}
    assert explained_variance(credit.details) == pytest.approx(1 - np.var([-0.25, 0.75]) / np.var([0.25, 1.0]))
    assert explained_variance(Details()) is None


def test_credit_that_takes_more_than_whole_groups_is_not_given_outside_a_run() -> None:
    trace = make_trace("r0", calls=[make_call("a")])
    for algorithm in (GlobalRelative(), ActorCritic(), Distill()):
        assert credit_alone([trace], assembled(trace), algorithm, LearnConfig()) is None
    found = credit_alone([trace], assembled(trace), GRPO, LearnConfig())
    assert found is not None and found.by_rollout == {"r0": 0.0}
