"""Chat Completions: what goes to an engine that can do it, reasoning, the role developer, ids of requests."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.contract.gateway_room import HELLO, Room, gateway_room

from leyden.testing.scripted import Reply

FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


@pytest.fixture(scope="module")
def able(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    policies = {"main": {"engine_features": ["response_format", "images", "reasoning"]}, "plain": {}}
    with gateway_room(tmp_path_factory.mktemp("features"), {"policies": policies}) as room:
        yield room


ASKS = [
    ({"response_format": FORM}, "response_format", "response_format"),
    ({"response_format": {"type": "json_object"}}, "response_format", "response_format"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "reasoning"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, IMAGE]}]},
        "messages[0].content[1]",
        "images",
    ),
]


@pytest.mark.parametrize(("ask", "field", "feature"), ASKS)
def test_what_an_engine_can_do_is_passed_on_as_it_came(
    able: Room, ask: dict[str, Any], field: str, feature: str
) -> None:
    assert able.chat(able.start(), {"model": "main", "messages": HELLO, **ask}).status == 200
    assert able.engine.requests[-1].items() >= ask.items()


@pytest.mark.parametrize(("ask", "field", "feature"), ASKS)
def test_what_an_engine_is_not_known_to_do_is_refused_with_the_key_to_set(
    able: Room, ask: dict[str, Any], field: str, feature: str
) -> None:
    answer = able.chat(able.start(), {"model": "plain", "messages": HELLO, **ask})
    assert (answer.status, answer.error["field"]) == (400, field)
    assert feature in answer.error["message"] and "policies.plain.engine_features" in answer.error["hint"]


def test_a_call_with_images_is_answered_and_not_trained(able: Room) -> None:
    started = able.start()
    able.chat(started, {"model": "main", "messages": [{"role": "user", "content": [IMAGE]}]})
    assert [call.refusal for call in able.calls(started)] == ["images"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_relayed_under_the_name_the_engine_gave_it(able: Room, name: str, stream: bool) -> None:
    able.engine.behaviour.reply = lambda body: Reply(reasoning="hmm", reasoning_field=name, text="yes")
    started = able.start()
    answer: Any = able.sdk(started).chat.completions.create(model="main", messages=HELLO, stream=stream)
    if stream:
        assert "".join(getattr(chunk.choices[0].delta, name, None) or "" for chunk in answer) == "hmm"
    else:
        assert getattr(answer.choices[0].message, name) == "hmm"
    [call] = able.calls(started)
    assert call.response is not None and call.response["choices"][0]["message"][name] == "hmm"


def test_the_role_developer_reaches_the_engine_as_system_and_is_named(able: Room) -> None:
    started = able.start()
    messages = [{"role": "developer", "content": "d"}, *HELLO]
    answer = able.chat(started, {"model": "main", "messages": messages})
    assert able.engine.requests[-1]["messages"] == [{"role": "system", "content": "d"}, *HELLO]
    assert "developer" in answer.headers["x-leyden-rewrites"].split(",")
    [call] = able.calls(started)
    assert "developer" in call.rewrites and call.request["messages"] == messages


def test_the_id_of_a_request_is_that_of_the_call(able: Room) -> None:
    started = able.start()
    raw = able.sdk(started).chat.completions.with_raw_response.create(model="main", messages=HELLO)
    assert raw.request_id == raw.headers["x-leyden-call"] == able.calls(started)[0].id


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"tools": [{"type": "function", "function": {"name": ["f"]}}]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function"}},
            "tool_choice",
        ),
    ],
)
def test_what_is_malformed_is_refused_by_name(able: Room, change: dict[str, Any], field: str) -> None:
    answer = able.chat(able.start(), {"model": "main", "messages": HELLO, **change})
    assert (answer.status, answer.error["field"]) == (400, field), answer.raw
