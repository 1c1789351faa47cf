"""An unmodified OpenAI SDK, synchronous and not, streaming and not, with tools, through the real gateway."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tests.contract.gateway_room import HELLO, Room, gateway_room

from leyden.base.records import Provenance
from leyden.testing.scripted import END, Behaviour, Faults, Reply, completion_ids, logprob, prompt_ids

TOOLS: Any = [{"type": "function", "function": {"name": "run_sql", "parameters": {"type": "object"}}}]


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    with gateway_room(tmp_path) as room:
        yield room


def test_a_chat_is_answered_and_recorded_token_by_token(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="h\u00e9llo")
    started = room.start()
    answer = room.sdk(started).chat.completions.create(model="main", messages=HELLO)
    assert answer.choices[0].message.content == "h\u00e9llo"
    assert answer.model == "main"
    [call] = room.calls(started)
    ids, _ = completion_ids(Reply(text="h\u00e9llo"), None)
    assert call.prompt_ids.tolist() == prompt_ids({"messages": HELLO})
    assert call.choices[0].completion_ids.tolist() == ids
    assert call.choices[0].logprobs.tolist() == [logprob(k) for k in range(len(ids))]
    assert call.choices[0].logprobs.dtype == np.float32
    assert call.provenance == Provenance.SERVED
    assert (call.status, call.delivered, call.refusal, call.seq) == ("ok", True, None, 0)
    assert call.request == {"model": "main", "messages": HELLO}


def test_a_stream_is_recorded_like_its_unstreamed_twin(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="SELECT 1")
    whole, streamed = room.start(), room.start()
    room.sdk(whole).chat.completions.create(model="main", messages=HELLO)
    chunks = list(room.sdk(streamed).chat.completions.create(model="main", messages=HELLO, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "SELECT 1"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None and chunk.choices for chunk in chunks), "usage was not asked for"
    [first], [second] = room.calls(whole), room.calls(streamed)
    assert second.prompt_ids.tolist() == first.prompt_ids.tolist()
    assert second.choices[0].completion_ids.tolist() == first.choices[0].completion_ids.tolist()
    assert second.choices[0].logprobs.tolist() == first.choices[0].logprobs.tolist()
    assert first.response is not None and second.response is not None
    assert second.response["choices"][0]["message"]["content"] == "SELECT 1"
    assert second.response["usage"] == first.response["usage"]
    assert second.response["object"] == "chat.completion"


def test_usage_of_a_stream_comes_when_it_is_asked_for(room: Room) -> None:
    chunks = list(
        room.sdk(room.start()).chat.completions.create(
            model="main", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


def test_tools_go_through_both_ways(room: Room) -> None:
    calls = (("run_sql", '{"q": "SELECT 1"}'), ("run_sql", "{}"))
    room.engine.behaviour.reply = lambda body: Reply(text="", tool_calls=calls)
    started = room.start()
    sdk = room.sdk(started)
    answer = sdk.chat.completions.create(model="main", messages=HELLO, tools=TOOLS, tool_choice="auto")
    made = answer.choices[0].message.tool_calls
    assert made is not None and [(c.function.name, c.function.arguments) for c in made] == list(calls)  # type: ignore[union-attr]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert room.engine.requests[0]["tools"] == TOOLS
    follow_up: Any = [
        *HELLO, answer.choices[0].message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "1"} for call in made),
    ]  # fmt: skip
    room.engine.behaviour.reply = lambda body: Reply(text="one")
    assert (
        sdk.chat.completions.create(model="main", messages=follow_up, tools=TOOLS).choices[0].message.content == "one"
    )
    assert [call.seq for call in room.calls(started)] == [0, 1]


def test_streamed_tool_calls_are_assembled(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="", tool_calls=(("run_sql", '{"q": 1}'),))
    started = room.start()
    with room.sdk(started).chat.completions.create(model="main", messages=HELLO, tools=TOOLS, stream=True) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert any(delta.tool_calls for delta in deltas)
    [call] = room.calls(started)
    assert call.response is not None
    message = call.response["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "run_sql", "arguments": '{"q": 1}'}
    assert message["content"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_of_n_is_recorded(room: Room, stream: bool) -> None:
    texts = iter(["a", "bb", "ccc"])
    room.engine.behaviour.reply = lambda body: Reply(text=next(texts, "probe"))
    room.engine.behaviour.models = ("main@0",)
    warm = room.start()
    room.sdk(warm).chat.completions.create(model="main", messages=HELLO)  # brings the probe
    texts = iter(["a", "bb", "ccc"])
    started = room.start()
    answer: Any = room.sdk(started).chat.completions.create(model="main", messages=HELLO, n=3, stream=stream)
    if stream:
        assert {chunk.choices[0].index for chunk in answer} == {0, 1, 2}
    else:
        assert [choice.message.content for choice in answer.choices] == ["a", "bb", "ccc"]
    [call] = room.calls(started)
    assert [choice.text for choice in call.choices] == ["a", "bb", "ccc"]
    assert [len(choice.completion_ids) for choice in call.choices] == [2, 3, 4]


def test_logprobs_and_ids_are_in_the_answer_only_if_asked_for(room: Room) -> None:
    started = room.start()
    plain = room.chat(started, {"model": "main", "messages": HELLO}).json
    assert "prompt_token_ids" not in plain and "kv_transfer_params" not in plain
    assert plain["choices"][0].keys() == {"index", "message", "finish_reason", "logprobs"}
    assert plain["choices"][0]["logprobs"] is None
    asked = {"model": "main", "messages": HELLO, "logprobs": True, "return_token_ids": True}
    full = room.chat(started, asked).json
    assert len(full["choices"][0]["logprobs"]["content"]) == 3
    assert full["choices"][0]["token_ids"][-1] == END
    assert full["prompt_token_ids"] == prompt_ids({"messages": HELLO})


def test_completions_take_text_or_ids(room: Room) -> None:
    started = room.start()
    sdk = room.sdk(started)
    assert sdk.completions.create(model="main", prompt="abc").choices[0].text == "ok"
    assert sdk.completions.create(model="main", prompt=[7, 8, 9]).choices[0].text == "ok"
    chunks = list(sdk.completions.create(model="main", prompt="abc", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ok"
    first, second, third = room.calls(started)
    assert second.prompt_ids.tolist() == [7, 8, 9]
    assert third.choices[0].completion_ids.tolist() == first.choices[0].completion_ids.tolist()
    assert third.dialect == "openai_completions" and third.refusal is None


async def test_the_asynchronous_sdk_works_side_by_side(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text=body["messages"][0]["content"])
    started = await asyncio.to_thread(room.start)
    async with openai.AsyncOpenAI(base_url=started.base_url(room.url), api_key=started.token) as sdk:

        async def ask(text: str) -> str | None:
            answer = await sdk.chat.completions.create(model="main", messages=[{"role": "user", "content": text}])
            return answer.choices[0].message.content

        async def ask_streamed(text: str) -> str:
            messages: Any = [{"role": "user", "content": text}]
            stream = await sdk.chat.completions.create(model="main", messages=messages, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = [f"text {k}" for k in range(20)]
        assert await asyncio.gather(*map(ask, texts)) == texts
        assert await asyncio.gather(*map(ask_streamed, texts)) == texts
    calls = await asyncio.to_thread(room.calls, started)
    assert len(calls) == 40 and sorted(call.seq for call in calls) == list(range(40))
    assert len({call.sampling["seed"] for call in calls}) == 40


def test_the_key_alone_says_which_attempt_calls(room: Room) -> None:
    started = room.start()
    for prefix in ("/v1", "/openai/v1"):
        answer = room.request(
            "POST", prefix + "/chat/completions", {"model": "main", "messages": HELLO}, key=started.token
        )
        assert answer.status == 200
    path = started.base_url("").replace("/openai/v1", "/v1") + "/chat/completions"
    answer = room.request("POST", path, {"model": "main", "messages": HELLO}, x_api_key=started.token)
    assert answer.status == 200
    assert len(room.calls(started)) == 3


def test_the_model_list_names_the_policies(room: Room) -> None:
    started = room.start()
    assert [model.id for model in room.sdk(started).models.list()] == ["main"]


def test_an_engine_is_asked_under_the_name_it_lists(room: Room) -> None:
    started = room.start(policy_versions={"main": 3})
    room.sdk(started).chat.completions.create(model="main", messages=HELLO)
    assert room.engine.requests[-1]["model"] == "main@3"
    [call] = room.calls(started)
    assert (call.policy, call.policy_version) == ("main", 3)


def test_an_engine_that_lists_the_plain_name_is_asked_under_it(room: Room) -> None:
    room.engine.behaviour.models = ("main",)
    room.sdk(room.start()).chat.completions.create(model="main", messages=HELLO)
    assert room.engine.requests[-1]["model"] == "main"


@pytest.mark.parametrize(("again_s", "asked"), [(30.0, "main@0"), (0.0, "main")])
def test_a_listing_that_failed_is_asked_for_again_after_a_while_and_not_with_every_call(
    room: Room, monkeypatch: pytest.MonkeyPatch, again_s: float, asked: str
) -> None:
    monkeypatch.setattr("leyden.gateway.upstream.LISTING_AGAIN_S", again_s)
    room.engine.behaviour.models, room.engine.behaviour.models_status = ("main",), 503
    sdk = room.sdk(room.start())
    sdk.chat.completions.create(model="main", messages=HELLO)
    assert room.engine.requests[-1]["model"] == "main@0"
    room.engine.behaviour.models_status = 200
    sdk.chat.completions.create(model="main", messages=HELLO)
    assert room.engine.requests[-1]["model"] == asked


@pytest.mark.parametrize("listed", ["null", "[]", '{"data": ["main"]}', '{"data": null}', "no JSON"])
def test_a_listing_that_makes_no_sense_is_an_empty_one(room: Room, listed: str) -> None:
    room.engine.behaviour.models_text = listed
    room.sdk(room.start()).chat.completions.create(model="main", messages=HELLO)
    assert room.engine.requests[-1]["model"] == "main@0"


@pytest.mark.parametrize(
    ("faults", "refusal"),
    [
        (Faults(wrong_usage=True), "usage_mismatch"),
        (Faults(nan_logprob=True), "bad_logprob"),
    ],
)
def test_tokens_that_cannot_be_trusted_are_answered_and_refused_by_name(
    room: Room, faults: Faults, refusal: str
) -> None:
    warm = room.start()
    room.sdk(warm).chat.completions.create(model="main", messages=HELLO)
    room.engine.behaviour.faults = faults
    started = room.start()
    answer = room.sdk(started).chat.completions.create(model="main", messages=HELLO)
    assert answer.choices[0].message.content == "ok"
    [call] = room.calls(started)
    assert (call.status, call.refusal) == ("ok", refusal)


@pytest.mark.parametrize(
    ("missing", "flag"),
    [("token_ids", "return_token_ids"), ("prompt_token_ids", "return_token_ids"), ("logprobs", "logprobs")],
)
def test_an_engine_that_cannot_return_tokens_is_refused_with_its_name_and_the_flag(
    room: Room, missing: str, flag: str
) -> None:
    room.engine.behaviour = Behaviour(faults=Faults(missing=frozenset({missing})))
    started = room.start()
    answer = room.chat(started, {"model": "main", "messages": HELLO})
    assert answer.status == 502
    assert answer.error["type"] == "engine_incapable"
    assert room.engine.url in answer.error["message"] and flag in answer.error["message"]
    assert list(room.engine.requests) == [], "nothing was sampled"


def test_a_frozen_policy_may_be_served_by_an_engine_without_tokens(tmp_path: Path) -> None:
    with gateway_room(tmp_path, {"policies": {"frozen": {"trainable": False}}}) as room:
        room.engine.behaviour.faults = Faults(missing=frozenset({"token_ids", "prompt_token_ids"}))
        started = room.start()
        room.sdk(started).chat.completions.create(model="frozen", messages=HELLO)
        [call] = room.calls(started)
        assert call.provenance == Provenance.RETOKENIZED
        assert call.refusal == "missing_prompt_ids"
