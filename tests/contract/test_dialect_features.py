"""One table: what every dialect lets a harness ask for, and what the engine is asked for then.

Conversations with tools are in `test_dialect_parity`, real clients in `test_gateway_sdk`, `_responses` and `_messages`.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.contract.gateway_room import HELLO, Room, gateway_room
from tests.contract.test_dialect_faults import BODIES, post

from leyden.gateway.dialects import BY_NAME
from leyden.testing.scripted import Reply

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FORCED = {"type": "function", "function": {"name": "f"}}
TOOLS: dict[str, Any] = {
    "openai_chat": CHAT_TOOL,
    "openai_responses": {"type": "function", "name": "f", "parameters": SCHEMA},
    "anthropic": {"name": "f", "input_schema": SCHEMA},
}
IMAGE = {"url": "data:image/png;base64,AA"}
IMAGES: dict[str, Any] = {
    "openai_chat": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": IMAGE}]}]},
    "openai_responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": IMAGE["url"]}]}]},
    "anthropic": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}],
            }
        ]
    },
}
FORMATS: dict[str, Any] = {
    "openai_chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}}},
    "openai_responses": {"text": {"format": {"type": "json_schema", "name": "output", "schema": SCHEMA}}},
    "anthropic": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}
EFFORTS: dict[str, Any] = {
    "openai_chat": {"reasoning_effort": "low"},
    "openai_responses": {"reasoning": {"effort": "low"}},
    "anthropic": {"output_config": {"effort": "low"}},
}
CHOICES: dict[str, tuple[Any, Any, Any]] = {
    "openai_chat": ("required", FORCED, {"parallel_tool_calls": False}),
    "openai_responses": ("required", {"type": "function", "name": "f"}, {"parallel_tool_calls": False}),
    "anthropic": ({"type": "any"}, {"type": "tool", "name": "f"}, {}),
}


def cases() -> Iterator[Any]:
    """(dialect, what is asked for, what the engine is asked for)."""
    for name in TOOLS:
        yield (
            name,
            IMAGES[name],
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": IMAGE}]}]},
        )
        form = {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}}
        yield name, FORMATS[name], {"response_format": form}
        yield name, EFFORTS[name], {"reasoning_effort": "low"}
        must, one, alone = CHOICES[name]
        tools = {"tools": [TOOLS[name]]}
        yield name, {**tools, "tool_choice": must}, {"tools": [CHAT_TOOL], "tool_choice": "required"}
        yield name, {**tools, "tool_choice": one}, {"tools": [CHAT_TOOL], "tool_choice": FORCED}
        if name == "anthropic":
            alone = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
        yield name, {**tools, **alone}, {"parallel_tool_calls": False}
    for name in ("openai_chat", "openai_completions"):
        yield name, {"stop": "##"}, {"stop": "##"}
        yield name, {"stop": ["##", "end"]}, {"stop": ["##", "end"]}
        yield name, {"n": 3}, {"n": 3}
        yield name, {"seed": 7}, {"seed": 7}
        yield name, {"max_tokens": 9}, {"max_tokens": 9}
    yield "anthropic", {"stop_sequences": ["##", "end"]}, {"stop": ["##", "end"]}
    yield "anthropic", {"max_tokens": 9}, {"max_tokens": 9}
    yield "openai_chat", {"max_completion_tokens": 9}, {"max_tokens": 9}
    yield "openai_responses", {"max_output_tokens": 9}, {"max_tokens": 9}


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    policy = {"engine_features": ["response_format", "images", "reasoning"]}
    with gateway_room(tmp_path_factory.mktemp("features"), {"policies": {"main": policy}}) as room:
        yield room


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "asked", "expected"), list(cases()))
def test_what_a_harness_asks_for_reaches_the_engine_in_its_own_words(
    room: Room, name: str, asked: dict[str, Any], expected: dict[str, Any], stream: bool
) -> None:
    started = room.start()
    answer = post(room, started, name, stream=stream, **asked)
    assert answer.status == 200, answer.raw
    sent = room.engine.requests[-1]
    assert {key: sent.get(key) for key in expected} == expected
    assert len(room.calls(started)[0].choices) == expected.get("n", 1)


@pytest.mark.parametrize("name", BODIES)
def test_every_call_has_tokens_and_log_probabilities_and_the_client_has_them_only_if_it_asked(
    room: Room, name: str
) -> None:
    asks: dict[str, dict[str, Any]] = {
        "openai_chat": {"logprobs": True},
        "openai_completions": {"logprobs": 1},
        "openai_responses": {"include": ["message.output_text.logprobs"]},
        "anthropic": {},
    }
    wanted = asks[name]
    room.engine.behaviour.reply = lambda body: Reply(text="abc")
    plain, asked = room.start(), room.start()
    silent, told = post(room, plain, name), post(room, asked, name, **wanted)
    for started in (plain, asked):
        [call] = room.calls(started)
        assert len(call.choices[0].logprobs) == len(call.choices[0].completion_ids) == 4 and call.refusal is None
    assert b"token_ids" not in silent.raw and b'"logprob":' not in silent.raw and b"token_logprobs" not in silent.raw
    assert (b"logprob" in told.raw.replace(b'"logprobs":null', b"").replace(b'"logprobs":[]', b"")) == bool(wanted)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_every_answer_has_the_headers_that_its_clients_look_for(room: Room, name: str, stream: bool) -> None:
    started = room.start()
    answer = post(room, started, name, stream=stream)
    [call] = room.calls(started)
    headers = {key.lower(): value for key, value in answer.headers.items()}
    assert headers[BY_NAME[name].id_header.decode()] == headers["x-leyden-call"] == call.id
    assert headers["x-leyden-policy"] == "main@0"
    assert headers["content-type"].startswith("text/event-stream" if stream else "application/json")


@pytest.mark.parametrize("name", BODIES)
def test_the_time_of_an_attempt_bounds_the_wait_for_its_engine(room: Room, name: str) -> None:
    started = room.start(config={"timeout_seconds": 1})
    room.engine.behaviour.delay_s = 30.0
    try:
        answer = post(room, started, name)
    finally:
        room.engine.behaviour.delay_s = 0.0
    assert answer.status == 502 and "did not answer within 1 s" in answer.error["message"], answer.raw
    [call] = room.calls(started)
    assert call.status == "error" and call.latency_ms < 25_000


def test_a_message_that_a_harness_begins_with_has_one_form_in_every_dialect(room: Room) -> None:
    for name in ("openai_chat", "openai_responses", "anthropic"):
        assert post(room, room.start(), name).status == 200
        assert room.engine.requests[-1]["messages"] == HELLO
