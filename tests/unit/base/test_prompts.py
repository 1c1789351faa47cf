"""Slots: found in requests of any shape, replaced, and refused where that would be a guess."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.base.errors import ConfigError
from leyden.base.prompt_file import as_text, read_slots, write_slots
from leyden.base.prompts import (
    as_read,
    make_slot,
    name_of,
    places,
    put,
    slots_from_json,
    slots_to_json,
    substitute,
)
from leyden.base.templates import Template, escape


def chat(*texts: str, role: str = "system", tools: list[Any] | None = None) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for text in texts], "tools": tools or []}


def tool(name: str, description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


@settings(deadline=None)
@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=4), st.data())
def test_putting_the_original_text_in_place_is_the_identity(texts: list[str], data: st.DataObject) -> None:
    literals = data.draw(
        st.lists(st.text(min_size=1, max_size=8).filter(lambda s: "{p" not in s), min_size=1, max_size=3)
    )
    template = Template(tuple(literals), tuple(f"p{i}" for i in range(len(literals) - 1)))
    if not any(literal.strip() for literal in literals):
        return
    filled = template.fill({name: data.draw(st.text(max_size=20)) for name in template.names})
    body = chat(*texts, filled)
    slot = make_slot("s", template.text, part=data.draw(st.booleans()))
    before = copy.deepcopy(body)
    found = substitute(body, [slot])
    assert found.texts == {} and found.changed == []
    assert put(body, found.texts) == before == body
    assert found.filled == ["s"] or found.conflicts


@settings(deadline=None)
@given(st.text(min_size=1).filter(str.strip), st.text(min_size=1).filter(str.strip))
def test_any_text_can_be_replaced_by_any_other(old: str, new: str) -> None:
    slot = make_slot("s", escape(old), escape(new))
    body = chat(old, "something else that is longer than " + old)
    found = substitute(body, [slot])
    assert put(body, found.texts)["messages"][0]["content"] == new
    assert found.changed == ([] if old == new else ["s"])


@settings(deadline=None)
@given(st.text(min_size=1).filter(str.strip), st.text(min_size=1).filter(str.strip))
def test_a_file_of_slots_is_read_back_as_it_was(old: str, new: str) -> None:
    import tempfile

    slots = [make_slot("s", escape(old), escape(new), where="tool", tool='a"b'), make_slot("t", escape(new), part=True)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.toml"
        write_slots(path, slots, {"s": "seen twice"})
        assert list(read_slots(path)) == slots
    assert list(slots_from_json(slots_to_json(slots))) == slots


def test_placeholders_are_filled_from_what_was_there() -> None:
    slot = make_slot("s", "You know {schema}. Answer.", "Answer in {{SQL}}: {schema}!", part=True)
    found = substitute(chat("Hello. You know t(a, {b}). Answer. Bye."), [slot])
    assert found.texts == {("messages", 0, "content"): "Hello. Answer in {SQL}: t(a, {b})! Bye."}


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (chat("old"), "messages[0].content"),
        (chat("old", role="developer"), "messages[0].content"),
        ({"messages": [{"role": "system", "content": [{"type": "text", "text": "old"}]}]},
         "messages[0].content[0].text"),
        ({"system": "old"}, "system"),
        ({"system": [{"type": "text", "text": "old"}]}, "system[0].text"),
        ({"instructions": "old"}, "instructions"),
        ({"input": [{"role": "developer", "content": [{"type": "input_text", "text": "old"}]}]},
         "input[0].content[0].text"),
    ],
)  # fmt: skip
def test_every_shape_of_a_system_message_is_found(body: dict[str, Any], place: str) -> None:
    found = substitute(body, [make_slot("s", "old", "new")])
    assert {name_of(path): text for path, text in found.texts.items()} == {place: "new"}
    assert as_read(body, {place: "new"}) == put(body, found.texts) != body


def test_descriptions_of_tools_are_found_by_the_name_of_their_tool() -> None:
    body = chat("hi", tools=[tool("a", "Does it."), tool("b", "Does it."), {"name": "c", "description": "Flat."}])
    slots = [
        make_slot("one", "Does it.", "Does it well.", where="tool", tool="b"),
        make_slot("two", "Flat.", "Sharp.", where="tool"),
    ]
    new = put(body, substitute(body, slots).texts)
    assert [place.text for place in places(new) if place.where == "tool"] == ["Does it.", "Does it well.", "Sharp."]


def test_other_roles_and_other_places_are_left_alone() -> None:
    body = {"messages": [{"role": "user", "content": "old"}, {"role": "assistant", "content": "old"}]}
    assert substitute(body, [make_slot("s", "old", "new")]).unmatched == ["s"]
    found = substitute(body, [make_slot("s", "old", "new", where="user")])
    assert [name_of(path) for path in found.texts] == ["messages[0].content"]
    assert substitute({"prompt": "old"}, [make_slot("s", "old", "new", where="prompt")]).changed == ["s"]


def test_a_slot_that_fits_two_messages_is_a_conflict_and_nothing_is_replaced() -> None:
    body = chat("same", "same", "other")
    found = substitute(body, [make_slot("s", "same", "x"), make_slot("t", "other", "y")])
    assert found.conflicts == ["slot 's' matches messages[0].content and messages[1].content each"]
    assert found.texts == {} and found.changed == []


def test_a_slot_that_fits_one_text_in_two_ways_is_a_conflict() -> None:
    found = substitute(chat("say it, say it"), [make_slot("s", "say it", "x", part=True)])
    assert found.conflicts == ["slot 's' matches messages[0].content in two ways"]


def test_two_slots_that_fit_the_same_text_are_a_conflict_and_neighbours_are_not() -> None:
    parts = [make_slot("a", "one two", "1", part=True), make_slot("b", "two three", "2", part=True)]
    assert substitute(chat("one two three"), parts).conflicts == [
        "slots 'a' and 'b' match the same text of messages[0].content"
    ]
    parts = [make_slot("a", "one ", "1", part=True), make_slot("b", "two", "22", part=True)]
    assert list(substitute(chat("one two one"), parts).texts.values()) == ["122 one"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"original": "a{x}{y}b"}, "side by side"),
        ({"original": "{x} and {x}"}, "twice"),
        ({"original": "{x}"}, "no text of its own"),
        ({"original": "{x} tail", "part": True}, "begin and end with text"),
        ({"original": "a {{x}} {x}"}, "both as a placeholder and as literal"),
        ({"original": "a", "text": "b {x}"}, r"uses \{x\}, which its original does not have \(known: none\)"),
        ({"original": "a", "text": " "}, "is empty"),
        ({"original": "a", "text": 'say {"a": 1}'}, r"slots\.s\.text has a single '\{'"),
        ({"original": "a", "where": "nowhere"}, "one of system, user, tool, prompt"),
        ({"original": "a", "tool": "t"}, "only a tool description"),
        ({"original": ""}, "original is missing"),
        ({"original": "a", "texts": "b"}, r"unknown keys \['texts'\]"),
        ({"original": 3}, "must be a str"),
        ("text", "must be a table"),
    ],
)
def test_a_slot_that_cannot_work_is_refused_by_name(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        slots_from_json({"s": fields})


def test_a_name_of_a_slot_fits_into_a_header() -> None:
    with pytest.raises(ConfigError, match="slot name 'a,b'"):
        make_slot("a,b", "text")


def test_a_file_without_slots_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("[other]\n")
    with pytest.raises(ConfigError, match="holds no slots"):
        read_slots(tmp_path / "empty.toml")
    with pytest.raises(ConfigError, match="leyden prompts discover"):
        read_slots(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[slots")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_slots(tmp_path / "bad.toml")


def test_slots_are_shown_to_people_with_single_braces() -> None:
    shown = as_text([make_slot("s", "a {{b}} {c}.", where="tool", tool="t", part=True)])
    assert shown == "## s (part of a description of tool t)\n\na {b} {c}.\n"


def test_the_slot_of_the_example_is_what_its_harness_sends() -> None:
    import importlib.util

    folder = Path(__file__).resolve().parents[3] / "examples" / "text_to_sql"
    spec = importlib.util.spec_from_file_location("text_to_sql_harness", folder / "harness.py")
    assert spec is not None and spec.loader is not None
    harness = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(harness)
    body = {"messages": harness.build_messages("CREATE TABLE t (a);", "How many?")}
    assert substitute(body, read_slots(folder / "prompts.json")).filled == ["system"]
