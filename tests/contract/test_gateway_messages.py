"""An unmodified Anthropic SDK speaks the Messages API through the real gateway: synchronous and not, whole and
streamed, with tools, thinking and token counts; what cannot be honoured is refused by name."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest
from tests.contract.gateway_room import HELLO, Answer, Room, gateway_room
from tests.contract.test_gateway_responses import FEATURES

from leyden.base.config import from_tree
from leyden.runner.environment import build_environment
from leyden.testing.running import Started, running_gateway
from leyden.testing.scripted import Faults, Reply, prompt_ids

TOOL: Any = {"name": "run_sql", "description": "runs it", "input_schema": {"type": "object"}}
ODD = '{"q":"SELECT 1","n":1.0}'
"""Arguments in a text that no program would write back."""


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with gateway_room(tmp_path_factory.mktemp("messages")) as room:
        yield room


@pytest.fixture(autouse=True)
def plain_engine(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply()
    room.engine.behaviour.faults = Faults()


@pytest.fixture(scope="module")
def able(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with gateway_room(tmp_path_factory.mktemp("able"), {"policies": {"main": {"engine_features": FEATURES}}}) as room:
        yield room


def base_url(room: Room, started: Started) -> str:
    return started.base_url(room.url).replace("/openai/v1", "/anthropic")


@pytest.fixture
def started(room: Room) -> Started:
    return room.start()


@pytest.fixture
def sdk(room: Room, started: Started) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=base_url(room, started), api_key=started.token, max_retries=0) as sdk:
        yield sdk


def post(room: Room, started: Started, path: str = "/v1/messages", **body: Any) -> Answer:
    told = {"model": "main", "max_tokens": 64, "messages": HELLO, **body}
    return room.request("POST", base_url(room, started).removeprefix(room.url) + path, told, x_api_key=started.token)


def test_a_message_is_answered_and_recorded_token_by_token(
    room: Room, started: Started, sdk: anthropic.Anthropic
) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="h\u00e9llo")
    answer = sdk.messages.create(model="main", max_tokens=64, system="Be brief.", messages=HELLO)
    assert answer.content[0].type == "text" and answer.content[0].text == "h\u00e9llo"
    assert (answer.stop_reason, answer.model, answer.role) == ("end_turn", "main", "assistant")
    engine_messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        len(prompt_ids({"messages": engine_messages})),
        7,
    )
    [call] = room.calls(started)
    assert answer._request_id == call.id and answer.id == f"msg_{call.id}"
    assert call.prompt_ids.tolist() == prompt_ids({"messages": engine_messages})
    assert call.refusal is None and call.dialect == "anthropic" and len(call.choices[0].logprobs) == 7


def test_a_tool_is_called_and_answered(room: Room, sdk: anthropic.Anthropic) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="", tool_calls=(("run_sql", ODD), ("run_sql", "{}")))
    answer = sdk.messages.create(model="main", max_tokens=64, messages=HELLO, tools=[TOOL])
    assert answer.stop_reason == "tool_use"
    uses: list[Any] = list(answer.content)
    assert [(use.type, use.name, use.input) for use in uses] == [
        ("tool_use", "run_sql", {"q": "SELECT 1", "n": 1.0}),
        ("tool_use", "run_sql", {}),
    ]
    assert room.engine.requests[-1]["tools"] == [
        {
            "type": "function",
            "function": {"name": "run_sql", "description": "runs it", "parameters": {"type": "object"}},
        }
    ]
    results: Any = [{"type": "tool_result", "tool_use_id": use.id, "content": "1"} for use in uses]
    history: Any = [
        *HELLO,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [*results, {"type": "text", "text": "and?"}]},
    ]
    room.engine.behaviour.reply = lambda body: Reply(text="one")
    sdk.messages.create(model="main", max_tokens=64, messages=history, tools=[TOOL])
    sent = room.engine.requests[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool", "user"]
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == ODD, "the engine's own text, not a rendering of it"


def test_the_exact_text_of_arguments_survives_a_restart_of_the_gateway(room: Room, started: Started) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="", tool_calls=(("run_sql", ODD),))
    answer = post(room, started, tools=[TOOL]).json
    assert answer["leyden_arguments"] == {"call_0": [ODD]}
    history = [
        *HELLO,
        # A program in another language writes 1.0 as 1.
        {"role": "assistant", "content": [{**answer["content"][0], "input": {"n": 1, "q": "SELECT 1"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_0", "content": "1"}]},
    ]
    config = from_tree({"policies": {"main": {"engine": room.engine.url}}}, base_dir=Path("."))
    with running_gateway(config, room.store) as second:
        assert post(replace(room, gateway=second), started, messages=history, tools=[TOOL]).status == 200
    assert room.engine.requests[-1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == ODD
    history[1]["content"][0]["input"] = {"q": "SELECT 2"}
    post(room, started, messages=history, tools=[TOOL])
    changed = room.engine.requests[-1]["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert changed == '{"q": "SELECT 2"}', "what the harness changed is what it sent"


@pytest.mark.parametrize(
    ("choice", "engine"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "run_sql"}, {"type": "function", "function": {"name": "run_sql"}}),
    ],
)
def test_a_choice_of_tools_reaches_the_engine_in_its_own_form(
    room: Room, started: Started, choice: Any, engine: Any
) -> None:
    told = {**choice, "disable_parallel_tool_use": True}
    assert post(room, started, tools=[TOOL], tool_choice=told).status == 200
    sent = room.engine.requests[-1]
    assert (sent["tool_choice"], sent["parallel_tool_calls"]) == (engine, False)


def test_the_stream_helper_puts_the_same_message_together(
    room: Room, started: Started, sdk: anthropic.Anthropic
) -> None:
    room.engine.behaviour.reply = lambda body: Reply(
        reasoning="so", text="a b", tool_calls=(("run_sql", '{"q": 1}'), ("run_sql", "{}"))
    )
    with sdk.messages.stream(model="main", max_tokens=64, messages=HELLO, tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_message()
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert [event.text for event in events if event.type == "text"] == ["a", " ", "b"]
    assert [event.thinking for event in events if event.type == "thinking"] == ["s", "o"]
    [call] = room.calls(started)
    assert call.response is not None
    assert [block.to_dict() for block in final.content] == call.response["content"]
    assert final.usage.to_dict() == call.response["usage"] and final.stop_reason == "tool_use"


async def test_the_asynchronous_sdk_works_whole_and_streamed(room: Room, started: Started) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="abc")
    async with anthropic.AsyncAnthropic(base_url=base_url(room, started), api_key=started.token) as sdk:
        answer = await sdk.messages.create(model="main", max_tokens=64, messages=HELLO)
        assert answer.content[0].to_dict() == {"type": "text", "text": "abc"}
        async with sdk.messages.stream(model="main", max_tokens=64, messages=HELLO) as stream:
            assert [text async for text in stream.text_stream] == ["a", "b", "c"]
        plain = await sdk.messages.create(model="main", max_tokens=64, messages=HELLO, stream=True)
        assert [event.type async for event in plain][-1] == "message_stop"


def test_the_environment_of_a_harness_is_all_that_the_sdk_needs(
    room: Room, started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = from_tree({"policies": {"main": {"engine": room.engine.url}}}, base_dir=tmp_path)
    env = build_environment(config, room.url, started.rollout, started.attempt, started.token, tmp_path)
    for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, env[name])
    with anthropic.Anthropic() as sdk:
        sdk.messages.create(model="main", max_tokens=64, messages=HELLO)
        assert sdk.messages.count_tokens(model="main", messages=HELLO).input_tokens > 0
    assert [call.status for call in room.calls(started)] == ["ok"]


def test_tokens_are_counted_by_the_engine_and_nothing_is_recorded(
    room: Room, started: Started, sdk: anthropic.Anthropic
) -> None:
    count = sdk.messages.count_tokens(model="main", system="Be brief.", messages=HELLO, tools=[TOOL])
    expected = prompt_ids({"messages": [{"role": "system", "content": "Be brief."}, *HELLO]})
    assert count.input_tokens == len(expected)
    assert room.calls(started) == []
    for path in ("/v1/messages/count_tokens", "/anthropic/v1/messages/count_tokens"):
        body = {"model": "main", "messages": HELLO}
        assert room.request("POST", path, body, x_api_key=started.token).json == {"input_tokens": 10}


def test_an_engine_that_cannot_count_is_an_error_that_says_so(room: Room, started: Started) -> None:
    room.engine.behaviour.faults = Faults(no_tokenize=True)
    answer = post(room, started, "/v1/messages/count_tokens", max_tokens=None)
    assert answer.status == 501 and "/tokenize" in answer.error["message"]
    assert answer.json["type"] == "error" and answer.error["code"] == "engine_incapable"


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"max_tokens": 3}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"model": "gpt-9"}, 404, "not_found_error"),
    ],
)
def test_a_count_is_refused_in_the_same_shape(
    room: Room, started: Started, change: dict[str, Any], status: int, kind: str
) -> None:
    body = {"model": "main", "messages": HELLO, **change}
    answer = room.request("POST", "/v1/messages/count_tokens", body, x_api_key=started.token)
    assert (answer.status, answer.json["type"], answer.error["type"]) == (status, "error", kind)
    assert room.request("POST", "/v1/messages/count_tokens", body).status == 401


@pytest.mark.parametrize(
    ("reply", "reason", "sequence"),
    [
        (Reply(text="a"), "end_turn", None),
        (Reply(text="a" * 80), "max_tokens", None),
        (Reply(text="a", stop_reason="###"), "stop_sequence", "###"),
        (Reply(text="", tool_calls=(("run_sql", "{}"),)), "tool_use", None),
        (Reply(text="", tool_calls=(("run_sql", "{}"),), finish_reason="stop"), "tool_use", None),
        (Reply(text="", finish_reason="content_filter"), "refusal", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_reason_to_stop_has_its_name(
    room: Room, sdk: anthropic.Anthropic, reply: Reply, reason: str, sequence: str | None, stream: bool
) -> None:
    room.engine.behaviour.reply = lambda body: reply
    asked: Any = {"model": "main", "max_tokens": 64, "messages": HELLO, "tools": [TOOL], "stop_sequences": ["###"]}
    if stream:
        with sdk.messages.stream(**asked) as events:
            answer: Any = events.get_final_message()
    else:
        answer = sdk.messages.create(**asked)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)
    assert room.engine.requests[-1]["stop"] == ["###"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_comes_back_to_the_engine_as_it_named_it(able: Room, name: str) -> None:
    able.engine.behaviour.reply = lambda body: Reply(reasoning="hmm", reasoning_field=name, text="yes")
    started = able.start()
    first = post(able, started, thinking={"type": "adaptive"}, output_config={"effort": "low"}).json
    assert first["content"][0] == {"type": "thinking", "thinking": "hmm", "signature": name}
    assert able.engine.requests[-1]["reasoning_effort"] == "low"
    history = [*HELLO, {"role": "assistant", "content": first["content"]}, *HELLO]
    post(able, started, messages=history)
    assert able.engine.requests[-1]["messages"][1] == {"role": "assistant", "content": "yes", name: "hmm"}


def test_a_format_and_images_reach_an_engine_that_can(able: Room) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AA"}
    content = [{"type": "text", "text": "see"}, {"type": "image", "source": source}]
    schema = {"type": "object", "properties": {}}
    started = able.start()
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = post(able, started, messages=[{"role": "user", "content": content}], output_config=form)
    assert answer.status == 200
    sent = able.engine.requests[-1]
    assert sent["messages"][0]["content"][1]["image_url"] == {"url": "data:image/png;base64,AA"}
    assert sent["response_format"]["json_schema"]["schema"] == schema
    assert able.calls(started)[0].refusal == "images"


def test_arguments_that_are_no_object_are_marked_and_come_back_as_they_were(room: Room, started: Started) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="", tool_calls=(("run_sql", '{"q": '),))
    [use] = post(room, started, tools=[TOOL]).json["content"]
    assert use["input"] == {"INVALID_JSON": '{"q": '}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "no", "is_error": True}
    history = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    answer = post(room, started, messages=history, tools=[TOOL])
    assert room.engine.requests[-1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"q": '
    assert "is_error" in answer.headers["x-leyden-rewrites"].split(",")


def test_a_retry_of_a_finished_message_is_replayed_also_as_a_stream(
    room: Room, started: Started, sdk: anthropic.Anthropic
) -> None:
    room.engine.behaviour.reply = lambda body: Reply(reasoning="r", text="abc", tool_calls=(("run_sql", ODD),))
    finals = []
    for retry in ("0", "1"):
        with sdk.messages.stream(
            model="main", max_tokens=64, messages=HELLO, tools=[TOOL], extra_headers={"x-stainless-retry-count": retry}
        ) as stream:
            finals.append(stream.get_final_message().to_dict())
    assert finals[0] == finals[1] and len(room.calls(started)) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages[0].role"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0]"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "The "}]}, "messages[1]"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[1].content[0]"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": 5}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"thinking": {"type": "adaptive"}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
        ({"output_config": {"task_budget": 3}}, "output_config.task_budget"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"service_tier": "standard_only"}, "service_tier"),
        ({"metadata": 3}, "metadata"),
        ({"stream": 1}, "stream"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(room: Room, change: dict[str, Any], field: str) -> None:
    before = len(room.engine.requests)
    answer = post(room, room.start(), **change)
    assert answer.status == 400, answer.raw
    assert answer.json["type"] == "error" and answer.error["type"] == "invalid_request_error"
    assert answer.error["field"] == field and answer.error["message"] and answer.error["hint"]
    assert len(room.engine.requests) == before


def test_neutral_values_and_what_changes_no_token_are_accepted(room: Room, started: Started) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    told: dict[str, Any] = {
        "system": [{"type": "text", "text": "s", **cached}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **cached}]}],
        "tools": [{**TOOL, **cached, "type": "custom"}],
        "metadata": {"user_id": "u"},
        "top_k": None,
        "thinking": {"type": "disabled"},
        "service_tier": "auto",
        "speed": "standard",
        **cached,
    }
    answer = post(room, started, **told)
    assert answer.status == 200, answer.raw
    assert room.engine.requests[-1]["messages"] == [{"role": "system", "content": "s"}, *HELLO]


def test_the_model_list_is_there_too(sdk: anthropic.Anthropic) -> None:
    assert [model.id for model in sdk.models.list()] == ["main"]


def test_errors_of_the_sdk_are_of_their_own_class(room: Room, started: Started, sdk: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="gpt-9"):
        sdk.messages.create(model="gpt-9", max_tokens=4, messages=HELLO)
    with (
        anthropic.Anthropic(base_url=base_url(room, started), api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(model="main", max_tokens=4, messages=HELLO)
