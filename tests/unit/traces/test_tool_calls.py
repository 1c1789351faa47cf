"""Tool calls and results in every dialect, and what their declaration does not allow."""

from typing import Any

import numpy as np
import pytest

from leyden.base.records import Attempt, Call, Provenance, Rollout, Task, Trace
from leyden.traces.tool_calls import num_wrong, tool_calls, tool_results

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def call(request: dict[str, Any], response: dict[str, Any] | None = None) -> Call:
    return Call(
        id="c", rollout_id="r", attempt_id="a", seq=0, dialect="openai_chat", alias="m", policy="m", policy_version=0,
        provenance=Provenance.SERVED, request=request, response=response, sampling={},
        prompt_ids=np.zeros(0, np.int32), choices=(), status="ok", delivered=True, refusal=None,
    )  # fmt: skip


def trace(*calls: Call) -> Trace:
    rollout = Rollout(id="r", task=Task(id="t"))
    return Trace(rollout=rollout, attempt=Attempt(id="a", rollout_id="r", number=1, started_at=0.0), calls=calls)


def chat(name: str, arguments: str) -> Call:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    asked = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return call({"tools": tools}, {"choices": [{"message": {"content": None, "tool_calls": [asked]}}]})


def test_tool_calls_are_found_in_every_dialect() -> None:
    responses = call(
        {"tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]},
        {"output": [{"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Rome"}'}]},
    )
    anthropic = call(
        {"tools": [{"name": "weather", "input_schema": SCHEMA}]},
        {"content": [{"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}}]},
    )
    for one in (chat("weather", '{"city": "Rome"}'), responses, anthropic):
        (asked,) = tool_calls(one)
        assert (asked.id, asked.name, asked.arguments, asked.fault) == ("1", "weather", {"city": "Rome"}, None)


@pytest.mark.parametrize(
    ("name", "arguments", "fault"),
    [
        ("wether", "{}", "no tool 'wether'"),
        ("weather", "{city: Rome}", "no JSON object"),
        ("weather", "[1]", "no JSON object"),
        ("weather", "{}", "'city' is missing"),
        ("weather", "", "'city' is missing"),
        ("weather", '{"city": 5}', "'city' is 5, not string"),
        ("weather", '{"city": "Rome", "days": 1.5}', "'days' is 1.5"),
        ("weather", '{"city": "Rome", "days": true}', "'days' is True"),
        ("weather", '{"city": "Rome", "unit": "K"}', "none of ['C', 'F']"),
        ("weather", '{"city": "Rome", "speed": 1}', "'speed' is not declared"),
    ],
)
def test_what_the_declaration_does_not_allow_is_named(name: str, arguments: str, fault: str) -> None:
    (asked,) = tool_calls(chat(name, arguments))
    assert asked.fault is not None and fault in asked.fault
    assert num_wrong(trace(chat(name, arguments), chat("weather", '{"city": "Rome", "days": 2.0}'))) == 1


def test_results_are_counted_once_although_requests_repeat_them() -> None:
    first = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
    second = {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "error: no"}]}
    block = {"type": "tool_result", "tool_use_id": "3", "content": "boom", "is_error": True}
    found = tool_results(
        trace(
            call({"messages": [first]}),
            call({"messages": [first, second, {"role": "user", "content": [block]}]}),
            call({"input": [{"type": "function_call_output", "call_id": "4", "output": "ok"}]}),
        )
    )
    assert [(r.id, r.text, r.is_error) for r in found] == [
        ("1", "sunny", False), ("2", "error: no", False), ("3", "boom", True), ("4", "ok", False)
    ]  # fmt: skip


def test_answers_without_tool_calls_and_odd_shapes_give_none() -> None:
    for response in (None, {}, {"choices": None}, {"choices": [{"message": None}, 3]}, {"content": "text"}):
        assert tool_calls(call({"tools": "many"}, response)) == []
    assert tool_results(trace(call({"messages": "hello", "input": "text"}))) == []
