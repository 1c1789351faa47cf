"""Templates: placeholders and literal braces, matching that never guesses."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.base.errors import ConfigError
from leyden.base.templates import Match, Template, escape

TEXT = st.text(max_size=40)
BRACED = st.text(st.sampled_from("{}ab \n\u00e9\U0001f600\ud800"), max_size=30)
PIECES = st.lists(st.text(st.sampled_from("ab{}x"), min_size=1, max_size=4), min_size=1, max_size=4)


def template_of(literals: list[str]) -> Template:
    return Template(tuple(literals), tuple(f"p{i}" for i in range(len(literals) - 1)))


def placements(template: Template, text: str, whole: bool) -> set[tuple[int, ...]]:
    """Every placement by trying all of them: the obvious reference."""
    found = set()

    def go(number: int, after: int, starts: tuple[int, ...]) -> None:
        if number == len(template.literals):
            end = starts[-1] + len(template.literals[-1])
            if not whole or (starts[0] == 0 and end == len(text)):
                found.add(starts)
            return
        for start in range(after, len(text) + 1):
            if text.startswith(template.literals[number], start):
                go(number + 1, start + len(template.literals[number]), (*starts, start))

    go(0, 0, ())
    return found


@settings(deadline=None)
@given(st.one_of(TEXT, BRACED))
def test_an_escaped_text_is_a_template_that_says_just_that(text: str) -> None:
    template = Template.parse(escape(text))
    assert template.names == () and template.fill({}) == text and template.text == escape(text)


@settings(deadline=None)
@given(PIECES)
def test_a_template_is_written_as_it_is_read(literals: list[str]) -> None:
    template = template_of(literals)
    assert Template.parse(template.text) == template


@settings(deadline=None)
@given(PIECES)
def test_a_shown_template_is_read_back_where_no_literal_looks_like_a_placeholder(literals: list[str]) -> None:
    template = template_of(literals)
    assert Template.loose(template.shown, template.names) == template


@pytest.mark.parametrize("text", ["{", "a } b", '{"json": 1}', "{a b}", "{1x}", "{{}", "{}"])
def test_a_single_brace_is_refused_with_its_place_and_the_rule(text: str) -> None:
    with pytest.raises(ConfigError, match=r"slots\.s\.text has a single '[{}]' at character \d+.*doubled"):
        Template.parse(text, "slots.s.text")


@settings(max_examples=300, deadline=None)
@given(PIECES, st.text(st.sampled_from("ab{}x"), max_size=9), st.booleans())
def test_there_is_a_match_when_there_is_a_placement_and_one_match_when_there_is_one(
    literals: list[str], text: str, whole: bool
) -> None:
    template = template_of(literals)
    assert len(template.matches(text, whole=whole)) == min(2, len(placements(template, text, whole)))


@settings(deadline=None)
@given(PIECES, st.data())
def test_what_was_matched_is_filled_to_the_same_text(literals: list[str], data: st.DataObject) -> None:
    template = template_of(literals)
    values = {name: data.draw(TEXT) for name in template.names}
    text = data.draw(TEXT) + template.fill(values) + data.draw(TEXT)
    found = template.matches(text, whole=False)
    assert found
    for match in found:
        assert text[: match.start] + template.fill(match.values) + text[match.end :] == text


def test_a_literal_that_occurs_in_a_value_is_told_as_two_ways() -> None:
    template = Template.parse("Q: {q} A: {a}.")
    assert template.matches("Q: one A: two.", whole=True) == (Match(0, 14, {"q": "one", "a": "two"}),)
    assert len(template.matches("Q: one A: A: two.", whole=True)) == 2
    assert template.matches("Q: one B: two.", whole=True) == ()


def test_matching_a_long_text_without_a_match_takes_no_time() -> None:
    template = Template.parse("a{p}a{q}a{r}a{s}b")
    assert template.matches("a" * 200_000, whole=True) == ()
    assert template.matches("a" * 200_000, whole=False) == ()


def test_only_known_names_are_placeholders_in_a_loose_text() -> None:
    assert Template.loose('{"q": {question}}', ["question"]) == Template(('{"q": ', "}"), ("question",))
