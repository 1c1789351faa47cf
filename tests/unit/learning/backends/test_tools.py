"""Tool calls in text: found, or left as text; however the text is cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.base.errors import ConfigError
from leyden.learning.backends.embedded.tools import ToolStream, check_parser, parse

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'


def test_a_call_is_found_and_its_arguments_are_json_text() -> None:
    content, calls, malformed = parse(f"Let me see.\n{CALL}", "hermes")
    assert content == "Let me see.\n" and malformed == 0
    assert calls[0].name == "add" and json.loads(calls[0].arguments) == {"a": 1, "b": [2]}
    assert calls[0].id.startswith("call_")


def test_several_calls_have_distinct_ids_and_blank_text_around_them_is_no_content() -> None:
    content, calls, _ = parse(f"\n{CALL}\n{CALL}\n", "qwen")
    assert content == "" and len(calls) == 2 and calls[0].id != calls[1].id


def test_arguments_quoted_once_more_count() -> None:
    _, calls, _ = parse('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "hermes")
    assert json.loads(calls[0].arguments) == {"x": 1}


@pytest.mark.parametrize(
    "block",
    ["{", "[]", "3", '{"name": 1, "arguments": {}}', '{"name": "f"}', '{"name": "f", "arguments": 3}',
     '{"name": "", "arguments": {}}', '{"name": "f", "arguments": "x"}', "[" * 100_000],
)  # fmt: skip
def test_a_malformed_block_stays_text_and_is_counted(block: str) -> None:
    text = f"a<tool_call>{block}</tool_call>b"
    assert parse(text, "hermes") == (text, [], 1)


def test_a_block_that_is_never_closed_stays_text() -> None:
    text = 'x <tool_call>{"name": "f", "arguments": {}}'
    assert parse(text, "hermes") == (text, [], 1)


def test_the_parser_none_keeps_everything() -> None:
    assert parse(CALL, "none") == (CALL, [], 0)


def test_white_space_alone_is_kept_when_there_is_no_call() -> None:
    assert parse(" \n", "hermes")[0] == " \n"


def test_an_unknown_parser_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"hermess.*hermes"):
        check_parser("hermess")


@given(
    st.lists(
        st.sampled_from([CALL, "<tool_call>", "</tool_call>", "<tool", " \n", "text <", "{}", "t"]),
        max_size=6,
    ),
    st.lists(st.integers(0, 60), max_size=12),
)
def test_how_a_text_is_cut_makes_no_difference(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole, calls, malformed = parse(text, "hermes")
    stream, content, found, at = ToolStream("hermes"), "", 0, 0
    for end in [*sorted(cuts), len(text)]:
        out = stream.push(text[at:end])
        at, content, found = max(at, end), content + out.content, found + len(out.calls)
    content += stream.finish().content
    assert (content, found, stream.num_malformed) == (whole, len(calls), malformed)
