"""Bodies of other dialects, read as messages."""

from typing import Any

import pytest

from leyden.traces.telemetry.bodies import said_in, spoken_in, tools_in

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
SPOKEN = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]
CHAT: dict[str, Any] = {
    "messages": SPOKEN,
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
}
MESSAGES = {
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]},
    ],
    "tools": [{"name": "add", "input_schema": {}}],
}
RESPONSES = {
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ],
    "tools": [{"type": "function", "name": "add", "parameters": {}}],
}


@pytest.mark.parametrize("body", [CHAT, MESSAGES, RESPONSES], ids=["chat", "messages", "responses"])
def test_the_same_conversation_is_read_from_every_dialect(body: dict[str, Any]) -> None:
    assert spoken_in(body) == SPOKEN
    assert tools_in(body) == [{"type": "function", "name": "add", "parameters": {}}]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            {"choices": [{"message": {"content": "hm", "tool_calls": [CALL]}, "finish_reason": "tool_calls"}]},
            "tool_calls",
        ),
        (
            {
                "content": [
                    {"type": "text", "text": "hm"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                ],
                "stop_reason": "tool_use",
            },
            "tool_use",
        ),
        (
            {
                "output": [
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hm"}]},
                    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'},
                ],
                "status": "completed",
            },
            "completed",
        ),
    ],
    ids=["chat", "messages", "responses"],
)  # fmt: skip
def test_the_same_answer_is_read_from_every_dialect(body: dict[str, Any], reason: str) -> None:
    [(message, told)] = said_in(body)
    assert (message["content"], message["tool_calls"], told) == ("hm", [CALL], reason)


def test_thinking_is_kept_apart_from_what_was_said() -> None:
    body = {
        "content": [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "so"}],
        "stop_reason": "end_turn",
    }
    assert said_in(body)[0][0] == {"role": "assistant", "content": "so", "reasoning_content": "why"}
    output = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]}, {"content": "so"}]
    assert said_in({"output": output})[0][0] == {"role": "assistant", "content": "so", "reasoning_content": "why"}


def test_prompts_are_texts_or_ids() -> None:
    assert spoken_in({"prompt": "once"}) == [{"role": "user", "content": "once"}]
    [message] = spoken_in({"prompt": [1, 2]})
    assert message["content"] == [{"type": "token_ids", "token_ids": [1, 2]}]
    assert spoken_in({}) == [] and said_in({}) == []


def test_what_has_no_place_in_a_message_stays_as_it_is() -> None:
    image = {"type": "image", "source": {"data": "x"}}
    blocks = [image, {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]}]
    result, rest = spoken_in({"messages": [{"role": "user", "content": blocks}]})
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "2"} and rest["content"] == [image]
