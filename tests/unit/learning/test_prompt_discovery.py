"""Slots found in recorded requests: constant texts, templates of near-constant ones, and what is left out."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.base.prompts import substitute
from leyden.learning.algorithms.prompts.discovery import Sighting, discover


def seen(attempt: str, *systems: str, tools: Mapping[str, str] | None = None, **given: Any) -> Sighting:
    messages = [{"role": "system", "content": text} for text in systems]
    listed = [
        {"type": "function", "function": {"name": name, "description": text}} for name, text in (tools or {}).items()
    ]
    return Sighting(body={"messages": messages, "tools": listed}, attempt=attempt, input=given)


def texts(sightings: Sequence[Sighting]) -> dict[str, str]:
    return {slot.name: slot.original.text for slot in discover(sightings).slots}


def test_a_constant_text_is_a_slot_with_its_braces_doubled() -> None:
    sightings = [seen(f"a{i}", "Answer in {JSON}.", tools={"look-up": "Looks."}) for i in range(3)]
    assert texts(sightings) == {"system": "Answer in {{JSON}}.", "tool_look_up": "Looks."}
    assert "3 calls of 3 attempts" in discover(sightings).notes["system"]


def test_what_varies_becomes_a_placeholder() -> None:
    days = ["Monday", "Tuesday the second", "a feast"]
    sightings = [seen(f"a{i}", f"You plan trips. Today is {day}. Be brief.") for i, day in enumerate(days)]
    assert texts(sightings) == {"system": "You plan trips. Today is {part_1}. Be brief."}


def test_a_field_of_the_input_is_a_placeholder_even_where_its_values_share_words() -> None:
    sightings = [
        seen(f"a{i}", f"Use the tables: table t{i}(x). Answer well.", schema=f"table t{i}(x)", question="q")
        for i in range(2)
    ]
    assert texts(sightings) == {"system": "Use the tables: {schema}. Answer well."}
    one = [seen("a", "Use the tables: table t9(x). Answer well.", schema="table t9(x)")]
    assert texts(one) == {"system": "Use the tables: {schema}. Answer well."}


def test_agents_that_speak_in_one_attempt_keep_slots_of_their_own() -> None:
    sightings = [
        seen(f"a{i}", text)
        for i in range(4)
        for text in ("You are a helpful assistant that plans the work.", "You are a helpful assistant that writes SQL.")
    ]
    assert sorted(texts(sightings).values()) == [
        "You are a helpful assistant that plans the work.",
        "You are a helpful assistant that writes SQL.",
    ]
    assert set(texts(sightings)) == {"system_1", "system_2"}


def test_a_step_counter_within_one_attempt_is_a_placeholder() -> None:
    text = "You solve tasks step by step and never give up before the end. This is step {} of ten, so hurry."
    sightings = [seen("a", text.format(i)) for i in range(5)]
    assert texts(sightings) == {"system": text.replace("{}", "{part_1}")}


def test_texts_that_share_only_a_few_words_are_not_one_slot() -> None:
    sightings = [seen("a", "You are Bob."), seen("b", "You are in charge of ships.")]
    assert sorted(texts(sightings).values()) == ["You are Bob.", "You are in charge of ships."]


def test_a_message_that_is_sent_twice_in_one_request_is_left_out_and_said() -> None:
    found = discover([seen("a", "Be kind to everyone.", "Be kind to everyone.")])
    assert found.slots == [] and "matches messages[0].content and messages[1].content" in found.left_out[0]


def test_a_message_that_is_the_task_itself_is_no_slot() -> None:
    found = discover([seen("a", "Count to three.", prompt="Count to three.")])
    assert found.slots == [] and "wholly the task's own" in found.left_out[0]


def test_half_a_character_is_left_out_and_said() -> None:
    found = discover([seen("a", "broken \ud800 text")])
    assert found.slots == [] and "half a character" in found.left_out[0]


def test_without_texts_there_are_no_slots() -> None:
    assert discover([]).slots == [] and discover([seen("a", " ")]).slots == []


PIECES = ["alpha", "beta", "gamma", "{x}", "delta,", ".", "\n"]
WORDS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=2, max_size=6), st.booleans())
def test_every_text_that_a_slot_was_made_from_is_found_in_exactly_one_way(
    parts: list[tuple[str, str]], together: bool
) -> None:
    frame = "The frame that every text shares: {}, and its middle which is long; {} at the end."
    sightings = [seen("a" if together else f"a{i}", frame.format(*pair)) for i, pair in enumerate(parts)]
    found = discover(sightings)
    assert found.slots
    for sighting in sightings:
        said = substitute(sighting.body, found.slots)
        assert said.conflicts == [] and said.texts == {}
        assert len(said.filled) == 1 or found.left_out


@pytest.mark.parametrize("number", [400])
def test_many_distinct_texts_are_aligned_in_reasonable_time(number: int) -> None:
    sightings = [
        seen(f"a{i}", f"A fixed beginning of some length. {i} {i * i} x{i}. A fixed end.") for i in range(number)
    ]
    found = discover(sightings)
    assert [slot.original.text for slot in found.slots] == ["A fixed beginning of some length. {part_1}. A fixed end."]
    assert "100 of 400 distinct system texts were not looked at" in found.left_out
