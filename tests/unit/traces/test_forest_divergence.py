from dataclasses import replace
from typing import Any

from tests.unit.traces.making import ids, make_call

from leyden.traces.divergence import Kind, divergence, survey

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "q"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "a", "refusal": None, "annotations": []}
ECHO = {"role": "assistant", "content": "a"}
MORE = {"role": "user", "content": "more"}


def spell(tokens: list[int]) -> str:
    """A decoder with two spellings: 12 is 1 then 2."""
    return "".join(str(token) for token in tokens)


def test_a_prompt_that_continues_the_answer_extends() -> None:
    found = divergence(ids(1, 2, 3), ids(1, 2, 3, 4))
    assert (found.kind, found.position) == (Kind.EXTENDS, 3)


def test_the_same_text_in_other_ids_is_retokenized() -> None:
    found = divergence(ids(5, 1, 2), ids(5, 12, 9), decode=spell)
    assert (found.kind, found.position) == (Kind.RETOKENIZED, 1)


def test_the_same_messages_with_other_text_are_the_templates_doing() -> None:
    found = divergence(
        ids(5, 6, 7),
        ids(5, 8, 7, 9),
        earlier_messages=[SYSTEM, USER, ANSWER],
        later_messages=[SYSTEM, USER, ECHO, MORE],
        decode=spell,
    )
    assert (found.kind, found.position) == (Kind.TEMPLATE, 1)


def test_history_that_was_rewritten_under_the_same_system_prompt_is_compaction() -> None:
    summary = {"role": "assistant", "content": "in short: a"}
    found = divergence(
        ids(5, 6, 7, 8),
        ids(5, 6, 9),
        earlier_messages=[SYSTEM, USER, ANSWER, MORE, ANSWER],
        later_messages=[SYSTEM, USER, summary, MORE],
    )
    assert (found.kind, found.position) == (Kind.COMPACTION, 2)


def test_another_first_question_is_a_new_conversation() -> None:
    found = divergence(ids(5, 6, 7), ids(5, 8), earlier_messages=[SYSTEM, USER, ANSWER], later_messages=[SYSTEM, MORE])
    assert (found.kind, found.position) == (Kind.NEW_CONVERSATION, 1)


def test_another_system_prompt_over_the_same_question_is_unknown() -> None:
    other = {"role": "system", "content": "be long"}
    found = divergence(ids(5, 6), ids(5, 7), earlier_messages=[SYSTEM, USER, ANSWER], later_messages=[other, USER])
    assert found.kind is Kind.UNKNOWN


def test_without_messages_only_the_place_speaks() -> None:
    assert divergence(ids(1, 2, 3), ids(9, 2)).kind is Kind.NEW_CONVERSATION
    assert divergence(ids(1, 2, 3), ids(1, 2, 4), earlier_prompt_len=2).kind is Kind.TEMPLATE
    assert divergence(ids(1, 2, 3), ids(1, 4, 4), earlier_prompt_len=2).kind is Kind.UNKNOWN


def chat(name: str, seq: int, prompt: tuple[int, ...], messages: list[Any]) -> Any:
    response = {"choices": [{"message": ANSWER}]}
    return make_call(name, seq=seq, prompt=prompt, request={"messages": messages}, response=response)


def test_interleaved_sub_agents_each_extend_their_own_call() -> None:
    a1, b1 = (1, 10), (1, 20)
    calls = [
        chat("a1", 0, a1, [SYSTEM, USER]),
        chat("b1", 1, b1, [SYSTEM, MORE]),
        chat("a2", 2, (*a1, 7, 8, 11), [SYSTEM, USER, ECHO, MORE]),
        chat("b2", 3, (*b1, 7, 8, 21), [SYSTEM, MORE, ECHO, USER]),
    ]
    found = survey(calls)
    assert [d.kind for d in found] == [Kind.NEW_CONVERSATION, Kind.EXTENDS, Kind.EXTENDS]
    assert [(d.earlier_call, d.later_call) for d in found] == [("a1", "b1"), ("a1", "a2"), ("b1", "b2")]


def test_a_branch_from_an_older_turn_still_extends() -> None:
    calls = [
        chat("first", 0, (1, 2), [USER]),
        chat("one", 1, (1, 2, 7, 8, 3), [USER, ECHO, MORE]),
        chat("other", 2, (1, 2, 7, 8, 4), [USER, ECHO, USER]),
        chat("again", 3, (1, 2), [USER]),
    ]
    assert [d.kind for d in survey(calls)] == [Kind.EXTENDS] * 3


def test_a_rerendered_turn_is_found_with_its_position_and_partner() -> None:
    calls = [
        chat("first", 0, (1, 2), [USER]),
        chat("second", 1, (1, 2, 7, 9, 3), [USER, ECHO, MORE]),
    ]
    (found,) = survey(calls)
    assert (found.kind, found.position) == (Kind.TEMPLATE, 3)
    assert (found.earlier_call, found.later_call) == ("first", "second")


def test_calls_without_ids_are_passed_over() -> None:
    assert survey([make_call("none", prompt=()), make_call("one", seq=1)]) == []


def test_an_answer_that_was_begun_and_comes_back_whole_was_not_rewritten() -> None:
    begun = [SYSTEM, USER, {"role": "assistant", "content": "It"}]
    whole = [SYSTEM, USER, {"role": "assistant", "content": "It is"}, MORE]
    for dialect, kind in (("anthropic", Kind.TEMPLATE), ("openai_chat", Kind.COMPACTION)):
        calls = [
            replace(
                make_call("one", prompt=(5, 1), completions=((2, 3),), request={"messages": begun}), dialect=dialect
            ),
            replace(make_call("two", prompt=(5, 12, 3, 9), seq=1, request={"messages": whole}), dialect=dialect),
        ]
        [found] = survey(calls)
        assert (found.kind, found.position) == (kind, 1)
