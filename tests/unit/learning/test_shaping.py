"""What happens to a step before credit: long answers, and distributions that are not the trained one."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.traces.making import OUTCOMES, make_call, make_trace

from leyden.base.config import from_tree
from leyden.base.errors import ConfigError, ObjectiveError
from leyden.base.records import Drop, Trace
from leyden.learning.algorithms import GroupRelative
from leyden.learning.shaping import check_sampling, dull_groups, punishment, refuse_mismatch, shaped
from leyden.traces.assemble import Assembly, assemble

DR_GRPO = GroupRelative(name="dr_grpo")


def assembled(*traces: Trace) -> Assembly:
    return assemble(traces, policy="main", trainable_outcomes=OUTCOMES)


def test_the_punishment_is_the_published_one() -> None:
    # DAPO: 20480 tokens at most, of which the last 4096 are punished.
    found = [punishment(n, 20480, 0.2, 1.0) for n in (0, 16384, 18432, 20480, 30000)]
    assert found == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])


@given(st.integers(1, 500), st.integers(0, 600), st.floats(0, 1), st.floats(0.1, 3))
@settings(deadline=None)
def test_more_tokens_are_never_punished_less_and_never_beyond_the_penalty(
    most: int, num: int, buffer: float, penalty: float
) -> None:
    first, second = (punishment(n, most, buffer, penalty) for n in (num, num + 1))
    assert -penalty <= second <= first <= 0.0
    assert punishment(num, most, 0.0, penalty) == 0.0


def test_a_rollout_loses_by_its_longest_answer_whether_that_is_trained_or_not() -> None:
    short, long = range(4), range(9)
    traces = [
        make_trace("r0", calls=[make_call("a", completions=[short]), make_call("b", seq=1, completions=[long])]),
        make_trace(
            "r1", calls=[make_call("c", completions=[short]), make_call("d", completions=[long], status="error")]
        ),
        make_trace("r2", calls=[make_call("e", completions=[short]), make_call("f", completions=[long], policy="x")]),
        make_trace("r3", calls=[], reward=None),
    ]
    before = assembled(*traces)
    after = shaped(before, max_tokens=10, buffer=0.5, penalty=2.0)
    assert [s.reward for s in after.rollouts] == pytest.approx([1 - 1.6, 1 - 1.6, 1.0, None])
    assert after.actions == before.actions and after.dropped == before.dropped
    assert shaped(before, max_tokens=10, buffer=0.0, penalty=2.0) is before


def test_a_step_sampled_from_another_distribution_is_refused_and_a_single_call_dropped() -> None:
    bent = make_call("a", sampling={"temperature": 1.0, "presence_penalty": 0.5})
    with pytest.raises(ObjectiveError, match=r"presence_penalty 0\.5 changes the distribution.*\(2 tokens\)"):
        refuse_mismatch(assembled(make_trace("r0", calls=[bent])), DR_GRPO)
    mixed = assembled(make_trace("r0", calls=[bent, make_call("b", seq=1)]))
    refuse_mismatch(mixed, DR_GRPO)
    assert mixed.dropped == {Drop.SAMPLING_MISMATCH: 2} and mixed.trained == 2
    refuse_mismatch(assembled(make_trace("r0", calls=[make_call("c", delivered=False)])), DR_GRPO)


@pytest.mark.parametrize(("key", "value"), [("temperature", 0.0), ("top_p", 0.9)])
def test_a_configuration_that_samples_otherwise_is_refused_before_anything_runs(key: str, value: float) -> None:
    tree = {"policies": {"main": {"sampling": {key: value}}}}
    with pytest.raises(ConfigError, match=rf"policies\.main\.sampling\.{key} is"):
        check_sampling(from_tree(tree, base_dir=Path()))


def test_groups_with_nothing_to_compare_are_found_those_without_a_reward_too() -> None:
    traces = [
        make_trace(f"{g}{k}", group_id=g, reward=value)
        for g, values in {"a": (1.0, 1.0), "b": (0.0, 1.0), "c": (1.0,), "d": (None, None)}.items()
        for k, value in enumerate(values)
    ]
    assert dull_groups(assembled(*traces), ["a", "b", "c", "d"]) == {"a", "c", "d"}
