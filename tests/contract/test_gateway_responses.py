"""An unmodified OpenAI SDK speaks the Responses API through the real gateway: synchronous and not, whole and
streamed, with tools, reasoning, continuation; what cannot be honoured is refused by name."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.contract.gateway_room import Answer, Room, gateway_room

from leyden.testing.running import Started
from leyden.testing.scripted import END, Faults, Reply, prompt_ids

TOOL: Any = {"type": "function", "name": "run_sql", "parameters": {"type": "object"}, "strict": False}
FEATURES = ["response_format", "images", "reasoning"]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with gateway_room(tmp_path_factory.mktemp("responses")) as room:
        yield room


@pytest.fixture(autouse=True)
def plain_engine(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply()
    room.engine.behaviour.faults = Faults()


@pytest.fixture(scope="module")
def able(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    """A room whose engine can do all that no probe tells."""
    with gateway_room(tmp_path_factory.mktemp("able"), {"policies": {"main": {"engine_features": FEATURES}}}) as room:
        yield room


def respond(room: Room, started: Started, **body: Any) -> Answer:
    path = started.base_url("") + "/responses"
    return room.request("POST", path, {"model": "main", "input": "hi", **body}, key=started.token)


def test_a_response_is_answered_and_recorded_token_by_token(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="h\u00e9llo")
    started = room.start()
    raw = room.sdk(started).responses.with_raw_response.create(
        model="main", instructions="Be brief.", input="hi", metadata={"a": "b"}, max_output_tokens=50
    )
    answer = raw.parse()
    assert answer.output_text == "h\u00e9llo" and answer.status == "completed" and answer.model == "main"
    assert answer.usage is not None and answer.usage.output_tokens == 7
    [call] = room.calls(started)
    assert answer.id == f"resp_{call.id}" and raw.headers["x-request-id"] == call.id
    engine_messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert room.engine.requests[-1]["messages"] == engine_messages
    assert room.engine.requests[-1]["max_tokens"] == 50
    assert call.prompt_ids.tolist() == prompt_ids({"messages": engine_messages})
    assert call.choices[0].completion_ids.tolist()[-1] == END and call.refusal is None
    assert call.dialect == "openai_responses" and call.request["instructions"] == "Be brief."


def test_a_tool_is_called_and_answered(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="", tool_calls=(("run_sql", '{"q":1}'), ("run_sql", "{}")))
    started = room.start()
    sdk = room.sdk(started)
    first = sdk.responses.create(model="main", input="hi", tools=[TOOL], tool_choice="auto")
    calls: list[Any] = list(first.output)
    assert [(c.type, c.name, c.arguments) for c in calls] == [
        ("function_call", "run_sql", '{"q":1}'),
        ("function_call", "run_sql", "{}"),
    ]
    room.engine.behaviour.reply = lambda body: Reply(text="one")
    results: Any = [{"type": "function_call_output", "call_id": c.call_id, "output": "1"} for c in calls]
    second = sdk.responses.create(model="main", input=results, tools=[TOOL], previous_response_id=first.id)
    assert second.output_text == "one" and second.previous_response_id == first.id
    sent = room.engine.requests[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "run_sql", "arguments": '{"q":1}'}


@pytest.mark.parametrize(
    ("choice", "engine"),
    [
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "run_sql"}, {"type": "function", "function": {"name": "run_sql"}}),
    ],
)
def test_a_choice_of_tools_reaches_the_engine_in_its_own_form(room: Room, choice: Any, engine: Any) -> None:
    answer = respond(room, room.start(), tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert answer.status == 200 and answer.json["tool_choice"] == choice
    assert room.engine.requests[-1]["tool_choice"] == engine
    assert room.engine.requests[-1]["parallel_tool_calls"] is False


def test_the_stream_helper_sees_every_event_and_the_same_response(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply(
        reasoning="so", text="a b", tool_calls=(("run_sql", '{"q": 1}'), ("run_sql", "{}"))
    )
    started = room.start()
    with room.sdk(started).responses.stream(model="main", input="hi", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "a b" and len(texts) == 3
    assert sum(kind == "response.output_item.added" for kind in kinds) == 4
    assert sum(kind == "response.output_item.done" for kind in kinds) == 4
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    [call] = room.calls(started)
    assert call.response is not None and call.response["output"][2]["arguments"] == '{"q": 1}'
    assert final.id == call.response["id"]
    done = {event.item.id: event.item.to_dict() for event in events if event.type == "response.output_item.done"}
    assert done == {item["id"]: item for item in call.response["output"]}


async def test_the_asynchronous_sdk_streams(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="abc")
    started = room.start()
    async with openai.AsyncOpenAI(base_url=started.base_url(room.url), api_key=started.token) as sdk:
        assert (await sdk.responses.create(model="main", input="hi")).output_text == "abc"
        async with sdk.responses.stream(model="main", input="hi") as stream:
            assert (await stream.get_final_response()).output_text == "abc"
        plain = await sdk.responses.create(model="main", input="hi", stream=True)
        assert [event.type async for event in plain][-1] == "response.completed"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_off_is_incomplete(room: Room, stream: bool) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="abcdef")
    answer = respond(room, room.start(), max_output_tokens=3, stream=stream)
    if stream:
        assert b"event: response.incomplete\n" in answer.raw and b"response.completed" not in answer.raw
        return
    assert (answer.json["status"], answer.json["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer.json["output"][0]["status"] == "incomplete"


def test_log_probabilities_come_when_they_are_included(room: Room) -> None:
    answer = respond(room, room.start(), include=["message.output_text.logprobs"], top_logprobs=0).json
    assert [entry["logprob"] for entry in answer["output"][0]["content"][0]["logprobs"]] == [-0.125, -0.25, -0.375]
    assert respond(room, room.start()).json["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_goes_out_as_an_item_and_comes_back_as_the_engine_named_it(able: Room, name: str) -> None:
    able.engine.behaviour.reply = lambda body: Reply(reasoning="hmm", reasoning_field=name, text="yes")
    started = able.start()
    sdk = able.sdk(started)
    include: Any = ["reasoning.encrypted_content"]
    answer = sdk.responses.create(model="main", input="hi", reasoning={"effort": "low"}, include=include)
    thought: Any = answer.output[0]
    assert thought.type == "reasoning" and thought.content[0].text == "hmm" == thought.encrypted_content
    assert able.engine.requests[-1]["reasoning_effort"] == "low"
    items: Any = [{"role": "user", "content": "hi"}, *(item.model_dump(exclude_none=True) for item in answer.output)]
    items[1].pop("content")  # what is left where a client keeps only what is sealed
    sdk.responses.create(model="main", input=[*items, {"role": "user", "content": "go on"}])
    assert able.engine.requests[-1]["messages"][1] == {"role": "assistant", "content": "yes", name: "hmm"}


def test_a_format_and_images_reach_an_engine_that_can(able: Room) -> None:
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}]
    started = able.start()
    answer = respond(able, started, input=[{"role": "user", "content": parts}], text={"format": form})
    assert answer.status == 200
    sent = able.engine.requests[-1]
    assert sent["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    assert sent["messages"][0]["content"][1] == {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,AA"},
    }
    assert able.calls(started)[0].refusal == "images", "a learner of text cannot see what the engine saw"


def test_the_role_developer_reaches_the_engine_as_system_and_is_named(room: Room) -> None:
    started = room.start()
    answer = respond(room, started, input=[{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}])
    assert room.engine.requests[-1]["messages"][0] == {"role": "system", "content": "d"}
    assert "developer" in answer.headers["x-leyden-rewrites"].split(",")


def test_a_response_is_continued_within_its_attempt_only(room: Room) -> None:
    first, other = room.start(), room.start()
    told = respond(room, first, instructions="not carried over").json["id"]
    unstored = respond(room, first, store=False).json["id"]
    again = respond(room, first, input="more", previous_response_id=told).json["id"]
    third = respond(room, first, input="most", previous_response_id=again)
    assert third.status == 200
    roles = [message["role"] for message in room.engine.requests[-1]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    for started, previous in ((other, told), (first, unstored), (first, "resp_nobody"), (first, "x")):
        refused = respond(room, started, previous_response_id=previous)
        assert (refused.status, refused.error["field"]) == (404, "previous_response_id")
    live = room.admin("POST", "/v1/responses", {"model": "main", "input": "hi", "previous_response_id": told})
    assert (live.status, live.error["field"]) == (400, "previous_response_id")


def test_a_retry_of_a_finished_response_is_replayed_also_as_a_stream(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="abc", tool_calls=(("run_sql", "{}"),))
    started = room.start()
    sdk = room.sdk(started)
    finals = []
    for retry in ("0", "1"):
        headers = {"x-stainless-retry-count": retry}
        with sdk.responses.stream(model="main", input="hi", tools=[TOOL], extra_headers=headers) as stream:
            finals.append(stream.get_final_response().to_dict())
    assert finals[0] == finals[1] and len(room.calls(started)) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x"}]}]},
            "input[0].content[0]",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"include": [{}]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"metadata": 3}, "metadata"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"model": ""}, "model"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(room: Room, change: dict[str, Any], field: str) -> None:
    before = len(room.engine.requests)
    answer = respond(room, room.start(), **change)
    assert answer.status == 400, answer.raw
    assert answer.error["field"] == answer.error["param"] == field
    assert answer.error["type"] == "invalid_request_error" and answer.error["message"] and answer.error["hint"]
    assert len(room.engine.requests) == before


def test_neutral_values_and_what_changes_no_token_are_accepted(room: Room) -> None:
    answer = respond(
        room,
        room.start(),
        truncation="disabled",
        background=False,
        service_tier="auto",
        user="u",
        store=True,
        safety_identifier="s",
        prompt_cache_key="k",
        reasoning={"effort": None, "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "medium"},
        tools=[],
        tool_choice="auto",
        include=[],
        conversation=None,
        stream_options={"include_obfuscation": False},
        stream=True,
    )
    assert answer.status == 200, answer.raw
