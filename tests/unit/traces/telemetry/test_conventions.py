"""Every way in which a model call is reported, read as the same call."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.traces.telemetry import CONVENTIONS, Report, ReportedCall, ReportedEvent
from leyden.traces.telemetry.base import from_json, in_order, nested
from leyden.traces.telemetry.meaning import meaning_of, record_id

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1 + 1?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
    },
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
]
ABOUT = {"gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 8, "gen_ai.usage.output_tokens": 3}


def report(
    attributes: Mapping[str, Any], events: Sequence[tuple[str, Mapping[str, Any]]] = (), **fields: Any
) -> Report:
    told = {"trace_id": "1" * 32, "span_id": "2" * 16, "name": "chat m", "started_at": 1.0, "ended_at": 2.0, **fields}
    return Report(
        attributes=attributes, events=[ReportedEvent(name=n, at=1.5, attributes=a) for n, a in events], **told
    )


PARTS = [
    {"role": "user", "parts": [{"type": "text", "content": "1 + 1?"}]},
    {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1}}]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "2"}]},
]
SYSTEM = [{"type": "text", "content": "be brief"}]
ANSWER = [{"role": "assistant", "parts": [{"type": "text", "content": "it is 2"}], "finish_reason": "stop"}]
DEFINITIONS = [{"type": "function", "name": "add", "parameters": SCHEMA}]

CURRENT_TEXT = report(
    {
        **ABOUT,
        "gen_ai.operation.name": "chat",
        "gen_ai.system_instructions": json.dumps(SYSTEM),
        "gen_ai.input.messages": json.dumps(PARTS),
        "gen_ai.output.messages": json.dumps(ANSWER),
        "gen_ai.tool.definitions": json.dumps(DEFINITIONS),
    }
)
CURRENT_VALUES = report(
    {
        **ABOUT,
        "gen_ai.operation.name": "chat",
        "gen_ai.system_instructions": SYSTEM,
        "gen_ai.input.messages": PARTS,
        "gen_ai.output.messages": ANSWER,
        "gen_ai.tool.definitions": DEFINITIONS,
    }
)
DETAILS_EVENT = report(
    {**ABOUT, "gen_ai.operation.name": "chat"},
    [
        (
            "gen_ai.client.inference.operation.details",
            {
                "gen_ai.system_instructions": SYSTEM,
                "gen_ai.input.messages": PARTS,
                "gen_ai.output.messages": ANSWER,
                "gen_ai.tool.definitions": DEFINITIONS,
            },
        )
    ],
)
MESSAGE_EVENTS = report(
    {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 8,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.tool.definitions": json.dumps(DEFINITIONS),
    },
    [
        ("gen_ai.system.message", {"content": "be brief"}),
        ("gen_ai.user.message", {"gen_ai.event.content": json.dumps({"content": "1 + 1?"})}),
        ("gen_ai.assistant.message", {"tool_calls": json.dumps(MESSAGES[2]["tool_calls"])}),
        ("gen_ai.tool.message", {"gen_ai.event.content": json.dumps({"id": "c1", "content": "2"})}),
        ("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": json.dumps({"content": "it is 2"})}),
    ],
)
CONTENT_EVENTS = report(
    {
        "gen_ai.system": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.usage.prompt_tokens": 8,
        "gen_ai.usage.completion_tokens": 3,
        "gen_ai.tool.definitions": json.dumps(DEFINITIONS),
    },
    [
        ("gen_ai.content.prompt", {"gen_ai.prompt": json.dumps(MESSAGES)}),
        (
            "gen_ai.content.completion",
            {"gen_ai.completion": json.dumps([{"role": "assistant", "content": "it is 2", "finish_reason": "stop"}])},
        ),
    ],
)
NUMBERED = report(
    {
        "llm.request.type": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.usage.prompt_tokens": 8,
        "gen_ai.usage.completion_tokens": 3,
        "llm.usage.total_tokens": 11,
        "gen_ai.prompt.0.role": "system",
        "gen_ai.prompt.0.content": "be brief",
        "gen_ai.prompt.1.role": "user",
        "gen_ai.prompt.1.content": "1 + 1?",
        "gen_ai.prompt.2.role": "assistant",
        "gen_ai.prompt.2.tool_calls.0.id": "c1",
        "gen_ai.prompt.2.tool_calls.0.name": "add",
        "gen_ai.prompt.2.tool_calls.0.arguments": '{"a":1}',
        "gen_ai.prompt.3.role": "tool",
        "gen_ai.prompt.3.content": "2",
        "gen_ai.prompt.3.tool_call_id": "c1",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "it is 2",
        "gen_ai.completion.0.finish_reason": "stop",
        "llm.request.functions.0.name": "add",
        "llm.request.functions.0.parameters": json.dumps(SCHEMA),
    }
)
OPENINFERENCE = report(
    {
        "openinference.span.kind": "LLM",
        "llm.model_name": "m",
        "llm.token_count.prompt": 8,
        "llm.token_count.completion": 3,
        "llm.input_messages.0.message.role": "system",
        "llm.input_messages.0.message.content": "be brief",
        "llm.input_messages.1.message.role": "user",
        "llm.input_messages.1.message.contents.0.message_content.type": "text",
        "llm.input_messages.1.message.contents.0.message_content.text": "1 + 1?",
        "llm.input_messages.2.message.role": "assistant",
        "llm.input_messages.2.message.tool_calls.0.tool_call.id": "c1",
        "llm.input_messages.2.message.tool_calls.0.tool_call.function.name": "add",
        "llm.input_messages.2.message.tool_calls.0.tool_call.function.arguments": '{"a":1}',
        "llm.input_messages.3.message.role": "tool",
        "llm.input_messages.3.message.content": "2",
        "llm.input_messages.3.message.tool_call_id": "c1",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.content": "it is 2",
        "llm.finish_reason": "stop",
        "llm.tools.0.tool.json_schema": json.dumps(
            {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
        ),
    }
)
EVERY = {
    "current, as text": CURRENT_TEXT,
    "current, as values": CURRENT_VALUES,
    "details event": DETAILS_EVENT,
    "message events": MESSAGE_EVENTS,
    "content events": CONTENT_EVENTS,
    "numbered": NUMBERED,
    "openinference": OPENINFERENCE,
}


def read(span: Report) -> ReportedCall:
    call = meaning_of(span).call
    assert call is not None
    return call


@pytest.mark.parametrize("span", EVERY.values(), ids=EVERY)
def test_the_same_call_is_read_from_every_convention(span: Report) -> None:
    call = read(span)
    assert [dict(message) for message in call.messages] == MESSAGES
    assert [(said.text, said.finish_reason) for said in call.choices] == [("it is 2", "stop")]
    assert call.model == "m" and not call.completion
    assert call.usage == {"prompt_tokens": 8, "completion_tokens": 3, "total_tokens": 11}
    assert list(call.tools) == [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]


@pytest.mark.parametrize("span", EVERY.values(), ids=EVERY)
def test_what_the_call_tells_is_not_repeated_in_its_span(span: Report) -> None:
    told = json.dumps(meaning_of(span).attributes)
    assert "be brief" not in told and "it is 2" not in told
    assert "2222222222222222" in told


@pytest.mark.parametrize(
    ("attributes", "kind"),
    [
        ({"gen_ai.operation.name": "invoke_agent", "gen_ai.request.model": "m"}, "custom"),
        ({"gen_ai.operation.name": "embeddings", "gen_ai.request.model": "m"}, "custom"),
        ({"gen_ai.request.model": "m"}, "custom"),
        ({"gen_ai.operation.name": "chat"}, "call"),
        ({"openinference.span.kind": "CHAIN"}, "custom"),
        ({"openinference.span.kind": "tool", "tool.name": "add"}, "tool"),
        ({"gen_ai.operation.name": "execute_tool"}, "tool"),
        ({"traceloop.span.kind": "tool", "traceloop.entity.name": "add"}, "tool"),
        ({"traceloop.span.kind": "workflow"}, "custom"),
        ({}, "custom"),
    ],
)
def test_only_model_calls_are_calls_and_only_tools_are_tools(attributes: dict[str, Any], kind: str) -> None:
    assert meaning_of(report(attributes)).kind == kind


def test_a_call_without_content_has_its_counts_and_no_answer() -> None:
    call = read(report({**ABOUT, "gen_ai.operation.name": "chat", "gen_ai.response.id": "r"}))
    assert (list(call.messages), list(call.choices), call.response_id) == ([], [], "r")
    assert call.response()["choices"] == []


def test_a_completion_has_a_prompt_and_texts() -> None:
    told = {
        "openinference.span.kind": "LLM",
        "llm.invocation_parameters": '{"model": "m", "n": 2, "temperature": 0.5, "stream": true}',
        "llm.prompts.0.prompt.text": "once",
        "llm.choices.0.completion.text": " upon",
        "llm.choices.1.completion.text": " more",
        "output.value": '{"id": "cmpl-1", "choices": [{"finish_reason": "stop"}, {"finish_reason": "length"}]}',
    }
    call = read(report(told))
    assert call.request() == {"model": "m", "prompt": "once", "n": 2, "temperature": 0.5}
    assert [(c["text"], c["finish_reason"]) for c in call.response()["choices"]] == [
        (" upon", "stop"), (" more", "length"),
    ]  # fmt: skip
    assert call.response_id == "cmpl-1"


HOSTILE: list[dict[str, Any]] = [
    {"gen_ai.operation.name": "chat", "gen_ai.input.messages": "[" * 100_000},
    {"gen_ai.operation.name": "chat", "gen_ai.input.messages": '[{"parts": [{"content": NaN}]}]'},
    {"gen_ai.operation.name": "chat", "gen_ai.input.messages": '[1, null, {"parts": 3}, {"parts": [4, null]}]'},
    {"gen_ai.operation.name": "chat", "gen_ai.system_instructions": [None]},
    {"gen_ai.operation.name": "chat", "gen_ai.input.messages": '[{"parts": [null]}, {"parts": [4]}]'},
    {"gen_ai.operation.name": "chat", "gen_ai.output.messages": "[{}, 2, []]", "gen_ai.request.model": {"a": 1}},
    {"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": "many", "gen_ai.response.finish_reasons": 3},
    {"gen_ai.operation.name": ["chat"]},
    {"llm.request.type": "chat", f"gen_ai.prompt.{'9' * 5000}.content": "x", "gen_ai.prompt.99999999.role": "user"},
    {"llm.request.type": "chat", "gen_ai.prompt.0": "leaf", "gen_ai.prompt.0.role": "user", "gen_ai.prompt..": "x"},
    {"openinference.span.kind": "LLM", "llm.input_messages.0.message": "leaf", "llm.tools.0.tool": 3},
    {"openinference.span.kind": 5, "llm.invocation_parameters": "[1]"},
    {"openinference.span.kind": "LLM", "llm.invocation_parameters": '{"temperature": 1e999}', "output.value": "{]"},
    {"agentlightning.reward.x.value": 1, "agentlightning.reward.0": 1, "leyden.reward.": 1},
]


@pytest.mark.parametrize("attributes", HOSTILE, ids=range(len(HOSTILE)))
def test_attributes_that_are_nonsense_are_read_as_far_as_they_make_sense(attributes: dict[str, Any]) -> None:
    meaning = meaning_of(report(attributes))
    if meaning.call is not None:
        json.dumps([meaning.call.request(), meaning.call.response()], allow_nan=False)
    assert meaning.rewards == []


KEYS = sorted({key for span in EVERY.values() for key in (*span.attributes, *(e.name for e in span.events))})
VALUES: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["", "chat", "LLM", "TOOL", "execute_tool", "{}", "[{}]"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "parts", "type", "content", "tool_calls", "function", "message"]), inner
        )
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6),
    st.lists(st.tuples(st.sampled_from(KEYS), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3)), max_size=3),
)
def test_no_attribute_of_any_type_makes_reading_fail(attributes: dict[str, Any], events: list[Any]) -> None:
    for kind in ({}, {"gen_ai.operation.name": "chat"}, {"openinference.span.kind": "LLM"}):
        meaning = meaning_of(report({**attributes, **kind}, events))
        if meaning.call is not None:
            json.dumps([meaning.call.request(), meaning.call.response()], allow_nan=False)
            assert all(isinstance(said.text, str) for said in meaning.call.choices)


def test_numbered_attributes_keep_their_order_whatever_the_numbers() -> None:
    tree = nested({"p.10.x": 10, "p.2.x": 2, "p.0.x.y": 0, "other.1.x": 1, "p.2.x.z": 3}, "p.")
    assert in_order(tree) == [{"x": {"y": 0}}, {"x": {"z": 3}}, {"x": 10}]


def test_a_text_that_is_no_json_stays_a_text() -> None:
    assert from_json("{no") == "{no" and from_json("[1]") == [1] and from_json(3) == 3 and from_json("NaN") == "NaN"


def test_a_resent_span_has_the_same_id_and_any_other_span_another() -> None:
    span = report({})
    assert record_id("span", "a", span) == record_id("span", "a", report({"x": 1}))
    others = [
        record_id("span", "b", span),
        record_id("span", "a", report({}, name="n")),
        record_id("span", "a", report({}, started_at=0.5)),
        record_id("span", "a", report({}, ended_at=3.0)),
        record_id("span", "a", report({}, span_id="3" * 16)),
    ]
    assert len({record_id("span", "a", span), *others}) == 6


def test_every_convention_has_a_name_of_its_own() -> None:
    assert len({convention.name for convention in CONVENTIONS}) == len(CONVENTIONS)
