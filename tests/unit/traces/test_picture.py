from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tests.unit.traces.making import OUTCOMES, make_call, make_trace

from leyden.base.records import IntArray, Trace
from leyden.traces.assemble import Action, assemble
from leyden.traces.picture import Picture, picture


def actions_of(*traces: Trace, **settings: int) -> list[Action]:
    return list(assemble(traces, policy="main", trainable_outcomes=OUTCOMES, **settings).actions)  # type: ignore[arg-type]


def two_turns_and_a_rewrite() -> Trace:
    first = make_call("c0", prompt=(1, 2, 3), completions=[(7, 8)])
    second = make_call("c1", prompt=(1, 2, 3, 7, 8, 4), completions=[(9,)], seq=1)
    rewritten = make_call("c2", prompt=(1, 2, 5, 6), completions=[(9, 9)], seq=2)
    return make_trace(calls=[first, second, rewritten])


def ids(of: IntArray) -> str:
    """Ids as they are."""
    return " ".join(map(str, of.tolist()))


def check_sums(seen: Picture) -> None:
    assert sum(branch["num_tokens"] for branch in seen["branches"]) == seen["num_unique"]
    assert sum(branch["num_sampled"] for branch in seen["branches"]) == seen["num_sampled"]
    assert sum(branch["num_trained"] for branch in seen["branches"]) == seen["num_trained"]
    assert sum(branch["num_ends"] for branch in seen["branches"]) == seen["num_answers"]
    levels = [branch["level"] for branch in seen["branches"]]
    assert levels[0] == 0
    assert all(b <= a + 1 for a, b in pairwise(levels))


def test_a_divergence_stands_at_the_branch_that_it_began_with_both_sides() -> None:
    trace = two_turns_and_a_rewrite()
    seen = picture([trace], actions_of(trace), text=ids)
    check_sums(seen)
    root, kept, rewritten = seen["branches"]
    assert (root["text"], root["num_rows"]) == ("1 2", 3)
    assert (kept["text"], kept["num_sampled"], kept["ends"]) == ("3 7 8 4 9", 3, ["1", "2"])
    assert (rewritten["text"], rewritten["depth"], rewritten["level"]) == ("5 6 9 9", 2, 1)
    (why,) = rewritten["diverged"]
    assert (why["position"], why["earlier_call"], why["later_call"]) == (2, "c1", "c2")
    assert (why["earlier"], why["later"]) == ("3 7 8 4 9", "5 6 9 9")
    assert seen["kinds"] == {"extends": 1, why["kind"]: 1}
    assert not root["diverged"] and not kept["diverged"]


def test_only_actions_that_are_kept_count_as_trained() -> None:
    trace = two_turns_and_a_rewrite()
    calls = [replace(call, delivered=call.id != "c2") for call in trace.calls]
    trace = replace(trace, calls=calls)
    seen = picture([trace], actions_of(trace), text=ids)
    assert (seen["num_sampled"], seen["num_trained"]) == (5, 3)
    assert picture([trace], text=ids)["num_trained"] == 0


def test_a_window_trains_the_end_of_a_completion_only() -> None:
    trace = make_trace(calls=[make_call("c", prompt=(1, 2), completions=[range(10, 20)])])
    actions = list(
        assemble([trace], policy="main", trainable_outcomes=OUTCOMES, max_tokens=4, overlong="window").actions
    )
    seen = picture([trace], actions, text=ids)
    assert (seen["num_sampled"], seen["num_trained"]) == (10, 3)


def test_a_group_shares_its_prompt_and_names_calls_by_attempt() -> None:
    traces = [make_trace(f"r{n}", calls=[make_call(f"c{n}", completions=[(100 + n,)])]) for n in range(4)]
    seen = picture(traces, actions_of(*traces), text=ids)
    check_sums(seen)
    assert (seen["num_tokens"], seen["num_unique"], seen["num_trajectories"]) == (16, 7, 4)
    assert seen["branches"][0]["num_rows"] == 4
    assert [branch["ends"] for branch in seen["branches"][1:]] == [["1.1"], ["2.1"], ["3.1"], ["4.1"]]
    assert seen["kinds"] == {}  # rollouts of a group that differ have not diverged


def test_several_choices_are_named_and_calls_without_ids_are_counted() -> None:
    unknown = replace(make_call("u", seq=1), prompt_ids=np.zeros(0, np.int32))
    trace = make_trace(calls=[make_call("c", completions=[(7,), (8,)]), unknown])
    seen = picture([trace], text=ids)
    assert (seen["num_answers"], seen["num_unknown"]) == (2, 1)
    assert [branch["ends"] for branch in seen["branches"]] == [[], ["1/0"], ["1/1"]]


def test_a_text_in_other_ids_is_named_where_it_can_be_decoded() -> None:
    spell = {1: "a", 2: "b", 3: "ab", 9: "?"}
    first = make_call("c0", prompt=(9,), completions=[(1, 2)])
    second = make_call("c1", prompt=(9, 3, 9), completions=[(1,)], seq=1)
    trace = make_trace(calls=[first, second])
    seen = picture([trace], text=ids, decode=lambda ids: "".join(spell[i] for i in ids))
    assert seen["kinds"] == {"retokenized": 1}


def test_no_calls_are_an_empty_picture() -> None:
    seen = picture([make_trace()], text=ids)
    assert (seen["branches"], seen["num_unique"]) == ([], 0)


def test_what_is_shown_is_bounded_and_what_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MAX_BRANCHES", 2), ("MAX_ENDS", 3), ("SNIPPET_TOKENS", 2)):
        monkeypatch.setattr(f"leyden.traces.picture.{name}", most)
    calls = [make_call(f"c{n}", prompt=(1, 2, 3, 4), completions=[(50 + n,)], seq=n) for n in range(4)]
    same = [make_call(f"s{n}", prompt=(1, 2, 3, 4), completions=[(50,)], seq=4 + n) for n in range(4)]
    seen = picture([make_trace(calls=[*calls, *same])], text=ids)
    root, first = seen["branches"]
    assert seen["num_left_out"] == 3 and (root["text"], root["num_tokens"]) == ("1 2", 4)
    assert (first["num_ends"], len(first["ends"])) == (5, 3)
