from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.traces.making import OUTCOMES, make_call, make_trace

from leyden.base.records import Call, Drop, Outcome, Provenance, Trace
from leyden.traces.assemble import Assembly, assemble
from leyden.traces.forest import build_forest, leaves


def run(*traces: Trace, **settings: Any) -> Assembly:
    return assemble(traces, policy="main", trainable_outcomes=OUTCOMES, **settings)


def test_each_choice_of_each_identical_call_is_its_own_action() -> None:
    calls = [make_call(f"c{seq}", completions=[(7, 8), (7, 8, 9)], seq=seq) for seq in range(3)]
    assembly = run(make_trace(calls=calls))
    assert len(assembly.actions) == 6
    assert (assembly.sampled, assembly.trained, assembly.dropped) == (15, 15, {})
    expected = {(f"c{s}", i) for s in range(3) for i in (0, 1)}
    assert {(a.call_id, a.choice_index) for a in assembly.actions} == expected
    assert [a.order for a in assembly.actions] == list(range(6))


def test_actions_stand_in_the_order_of_time_whatever_order_the_calls_have() -> None:
    calls = [make_call(f"c{seq}", seq=seq) for seq in (2, 0, 1)]
    assert [a.call_id for a in run(make_trace(calls=calls)).actions] == ["c0", "c1", "c2"]


def test_interleaved_sub_agents_are_four_actions_on_two_trajectories() -> None:
    prompts = {"a1": (1, 10), "b1": (1, 20), "a2": (1, 10, 7, 8, 11), "b2": (1, 20, 7, 8, 21)}
    calls = [make_call(name, prompt=prompt, seq=seq) for seq, (name, prompt) in enumerate(prompts.items())]
    kept = run(make_trace(calls=calls)).kept
    forest = build_forest([[*a.prompt_ids, *a.completion_ids] for a in kept])  # type: ignore[misc]
    assert (len(kept), len(leaves(forest))) == (4, 2)


def test_an_action_tells_what_it_was_sampled_with() -> None:
    call = make_call("c", policy_version=3, sampling={"temperature": 0.7, "top_p": 1.0, "max_tokens": 9, "seed": 5})
    (action,) = run(make_trace(calls=[call], reward=0.25, outcome=Outcome.COMPLETED)).actions
    assert (action.temperature, action.policy_version, action.reward) == (0.7, 3, 0.25)
    assert (action.outcome, action.group_id, action.num_tokens) == (Outcome.COMPLETED, "g0", 2)
    assert action.drop is None and action.detail == ""


FAULTS: Mapping[str, tuple[dict[str, Any], Drop]] = {
    "other_policy": ({"policy": "judge"}, Drop.NOT_TRAINABLE),
    "error": ({"status": "error"}, Drop.FAILED_CALL),
    "aborted": ({"status": "aborted"}, Drop.FAILED_CALL),
    "open": ({"status": "open"}, Drop.FAILED_CALL),
    "undelivered": ({"delivered": False}, Drop.UNDELIVERED),
    "retokenized": ({"provenance": Provenance.RETOKENIZED}, Drop.RETOKENIZED),
    "altered": ({"provenance": Provenance.ALTERED}, Drop.ALTERED),
    "refused": ({"refusal": "usage_mismatch"}, Drop.REFUSED_TOKENS),
    "overlong": ({"prompt": range(100)}, Drop.OVERLONG),
    "stale": ({"policy_version": -1}, Drop.STALE),
    "greedy": ({"sampling": {"temperature": 0.0}}, Drop.SAMPLING_MISMATCH),
    "unknown_temperature": ({"sampling": {}}, Drop.SAMPLING_MISMATCH),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_of_a_call_drops_its_tokens_for_its_reason(name: str) -> None:
    settings, drop = FAULTS[name]
    assembly = run(
        make_trace(calls=[make_call("good"), make_call("bad", seq=1, **settings)]),
        max_tokens=50,
        min_version=0,
    )
    assert assembly.dropped == {drop: 2} and assembly.num_dropped_actions == {drop: 1}
    assert assembly.trained == 2
    assert assembly.actions[1].detail != ""


@pytest.mark.parametrize(
    "bent",
    [
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 1}},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_what_bends_the_sampled_distribution_is_a_mismatch_that_names_it(bent: dict[str, Any]) -> None:
    call = make_call("c", sampling={"temperature": 1.0, **bent})
    (action,) = run(make_trace(calls=[call])).actions
    assert action.drop is Drop.SAMPLING_MISMATCH
    assert next(iter(bent)) in action.detail


def test_neutral_parameters_are_no_mismatch() -> None:
    neutral = {
        "temperature": 0.5,
        "top_p": 1,
        "top_k": -1,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "stop": ["x"],
    }
    call = make_call("c", sampling={**neutral, "repetition_penalty": None, "response_format": {"type": "text"}})
    assert run(make_trace(calls=[call])).trained == 2


def test_what_was_asked_for_does_not_matter_only_what_was_used() -> None:
    call = replace(make_call("c"), sampling={"asked": {"temperature": 0.0, "top_p": 0.1}, "used": {"temperature": 1.0}})
    assert run(make_trace(calls=[call])).trained == 2


def test_the_first_reason_in_the_documented_order_is_counted() -> None:
    worst: dict[str, Any] = {}
    order: list[Drop] = []
    expected: list[Drop] = []
    for name in reversed(["other_policy", "error", "undelivered", "altered", "refused", "greedy", "overlong", "stale"]):
        settings, drop = FAULTS[name]
        worst |= settings
        trace = make_trace(calls=[make_call("c", **worst)], reward=None, outcome=Outcome.INFRA_ERROR)
        order.append(next(iter(run(trace, max_tokens=50, min_version=0).dropped)))
        expected.append(drop)
    assert order == expected


def test_a_call_of_an_earlier_attempt_is_superseded() -> None:
    trace = make_trace(calls=[make_call("c")])
    trace = replace(trace, calls=[replace(trace.calls[0], attempt_id="r0-earlier")])
    assert run(trace).dropped == {Drop.SUPERSEDED: 2}


@pytest.mark.parametrize(
    ("outcome", "reward", "expected", "drop"),
    [
        (Outcome.COMPLETED, 0.5, 0.5, None),
        (Outcome.COMPLETED, None, None, Drop.NO_REWARD),
        (Outcome.TIMEOUT, None, 0.0, None),
        (Outcome.TIMEOUT, 1.0, 0.0, None),
        (Outcome.INFRA_ERROR, 1.0, None, Drop.OUTCOME),
        (None, 1.0, None, Drop.OUTCOME),
    ],
)
def test_the_policy_for_the_outcome_decides_the_reward(
    outcome: Outcome | None, reward: float | None, expected: float | None, drop: Drop | None
) -> None:
    assembly = run(make_trace(calls=[make_call("c")], outcome=outcome, reward=reward))
    assert (assembly.actions[0].reward, assembly.actions[0].drop) == (expected, drop)
    assert (assembly.rollouts[0].reward, assembly.rollouts[0].drop) == (expected, drop)


def test_evaluation_and_holdout_are_never_trainable() -> None:
    evaluation = make_trace("r1", calls=[make_call("c1")], mode="val")
    holdout = make_trace("r2", calls=[make_call("c2")], split="holdout")
    assembly = run(evaluation, holdout)
    assert assembly.dropped == {Drop.NOT_TRAINABLE: 4} and assembly.trained == 0


def test_an_empty_completion_is_an_action_of_no_tokens() -> None:
    assembly = run(make_trace(calls=[make_call("c", completions=[()])]))
    assert (len(assembly.actions), assembly.sampled, assembly.trained) == (1, 0, 0)
    assert assembly.actions[0].drop is None


def test_a_call_without_an_answer_is_counted_though_it_has_no_action() -> None:
    assembly = run(make_trace(calls=[make_call("c", completions=[], status="error")]))
    assert (assembly.num_calls_without_choices, len(assembly.actions)) == (1, 0)


def test_a_rollout_without_calls_is_still_scored() -> None:
    assembly = run(make_trace("r1", reward=0.0))
    assert [(s.rollout_id, s.reward, s.drop) for s in assembly.rollouts] == [("r1", 0.0, None)]


faulty_calls = st.builds(
    lambda faults, lengths: ({k: v for f in faults for k, v in FAULTS[f][0].items()}, lengths),
    st.lists(st.sampled_from(sorted(FAULTS)), max_size=3),
    st.lists(st.integers(0, 4), max_size=3),
)
rollouts = st.tuples(
    st.lists(faulty_calls, max_size=4),
    st.sampled_from([*Outcome, None]),
    st.sampled_from([None, 0.0, 1.0]),
    st.sampled_from(["train", "val"]),
)


@given(st.lists(rollouts, max_size=5))
def test_every_sampled_token_is_trained_or_dropped_for_one_reason(made: list[Any]) -> None:
    traces = []
    for r, (calls, outcome, reward, mode) in enumerate(made):
        built: list[Call] = [
            make_call(f"r{r}c{c}", seq=c, completions=[range(n) for n in lengths], **settings)
            for c, (settings, lengths) in enumerate(calls)
        ]
        traces.append(make_trace(f"r{r}", calls=built, outcome=outcome, reward=reward, mode=mode))
    assembly = run(*traces, max_tokens=50, min_version=0)
    sampled = sum(n for calls, *_ in made for _, lengths in calls for n in lengths)
    assert assembly.sampled == sampled == assembly.trained + sum(assembly.dropped.values())
    assert assembly.trained == sum(a.num_tokens for a in assembly.kept)
    assert len(assembly.actions) == sum(len(lengths) for calls, *_ in made for _, lengths in calls)
