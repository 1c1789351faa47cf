"""Thinking and begun answers (prefill) of the Messages API: asked of engines in their own words, given as blocks,
streamed and not, taken back in later turns; what is trained stays what was sampled."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest
from tests.contract.gateway_room import HELLO, Answer, Room, gateway_room

from leyden.base.config import from_tree
from leyden.base.records import Outcome
from leyden.loop import assemble_for
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.running import Started
from leyden.testing.scripted import Behaviour, Faults, Reply

ENABLED = {"type": "enabled", "budget_tokens": 20}
FEATURES = ["reasoning", "thinking_budget"]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    policies = {
        "main": {"engine_features": FEATURES, "max_context": 65536},
        "unbound": {"engine_features": ["reasoning"], "sampling": {"max_tokens": 48}},
        "plain": {},
    }
    with gateway_room(tmp_path_factory.mktemp("thinking"), {"policies": policies}) as room:
        yield room


@pytest.fixture(autouse=True)
def plain_engine(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply(reasoning="six times seven", text="42")
    room.engine.behaviour.faults = Faults()


def post(room: Room, started: Started, path: str = "/v1/messages", **body: Any) -> Answer:
    where = started.base_url("").replace("/openai/v1", "/anthropic")
    told = {"model": "main", "max_tokens": 200, "messages": HELLO, **body}
    return room.request("POST", where + path, told, x_api_key=started.token)


def sdk_of(room: Room, started: Started) -> anthropic.Anthropic:
    url = started.base_url(room.url).replace("/openai/v1", "/anthropic")
    return anthropic.Anthropic(base_url=url, api_key=started.token, max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_asked_of_the_engine_and_given_as_a_block(room: Room, stream: bool) -> None:
    started = room.start()
    asked: Any = {"model": "main", "max_tokens": 200, "messages": HELLO, "thinking": ENABLED}
    kinds: list[str] = []
    with sdk_of(room, started) as sdk:
        if stream:
            with sdk.messages.stream(**asked) as events:
                kinds = [event.type for event in events]
                answer: Any = events.get_final_message()
        else:
            answer = sdk.messages.create(**asked)
    sent = room.engine.requests[-1]
    assert sent["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    assert sent["thinking_token_budget"] == 20 and "thinking" not in sent
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert (answer.content[0].thinking, answer.content[1].text) == ("six times seven", "42")
    assert answer.content[0].signature == "reasoning_content", "ours: no seal, but where the engine gave it"
    assert not stream or ("thinking" in kinds and "signature" in kinds)


def test_thinking_that_comes_back_reaches_the_engine_and_the_conversation_is_one(room: Room) -> None:
    started = room.start()
    first = post(room, started, thinking=ENABLED).json
    history = [*HELLO, {"role": "assistant", "content": first["content"]}, *HELLO]
    assert post(room, started, thinking=ENABLED, messages=history).status == 200
    assert room.engine.requests[-1]["messages"][1]["reasoning_content"] == "six times seven"
    calls = room.calls(started)
    seen = [*calls[0].prompt_ids, *calls[0].choices[0].completion_ids]
    assert calls[1].prompt_ids.tolist()[: len(seen)] == seen


def test_switching_thinking_off_reaches_the_template_and_needs_nothing(room: Room) -> None:
    started = room.start()
    answer = post(room, started, model="plain", thinking={"type": "disabled"}).json
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert room.engine.requests[-1]["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert "chat_template_kwargs" not in (post(room, started, model="plain"), room.engine.requests[-1])[1]


def test_a_budget_that_no_answer_can_reach_asks_nothing_of_the_engine(room: Room) -> None:
    started = room.start()
    answer = post(room, started, model="unbound", thinking={"type": "enabled", "budget_tokens": 48}, max_tokens=4000)
    assert answer.status == 200, answer.raw
    assert "thinking_token_budget" not in room.engine.requests[-1] and room.engine.requests[-1]["max_tokens"] == 48
    assert room.calls(started)[0].refusal is None
    refused = post(room, started, model="unbound", thinking={"type": "enabled", "budget_tokens": 47}, max_tokens=4000)
    assert (refused.status, refused.error["field"]) == (400, "thinking.budget_tokens")
    assert "thinking_budget" in refused.error["hint"] and "max_tokens" in refused.error["hint"]


@pytest.mark.parametrize(
    ("reasoning", "refusal"), [("short", None), ("far more than what twenty tokens can hold", "thinking_budget")]
)
def test_a_call_whose_budget_was_reached_is_not_trained_since_its_end_was_not_sampled(
    room: Room, reasoning: str, refusal: str | None
) -> None:
    room.engine.behaviour.reply = lambda body: Reply(reasoning=reasoning, text="42")
    started = room.start()
    answer = post(room, started, thinking=ENABLED).json
    assert answer["content"][0]["thinking"] == reasoning[:20]
    assert room.calls(started)[0].refusal == refusal


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": "plain", "thinking": ENABLED}, "thinking"),
        ({"model": "plain", "thinking": {"type": "adaptive"}}, "thinking"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"thinking": {"type": "adaptive", "depth": 3}}, "thinking.depth"),
        ({"thinking": {"type": "some"}}, "thinking"),
        ({"thinking": "yes"}, "thinking"),
    ],
)
def test_thinking_that_cannot_be_honoured_is_refused_by_name(room: Room, body: dict[str, Any], field: str) -> None:
    before = len(room.engine.requests)
    answer = post(room, room.start(), **body)
    assert (answer.status, answer.error.get("field")) == (400, field), answer.raw
    assert answer.error["hint"] and len(room.engine.requests) == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_begun_answer_goes_on_and_only_what_was_sampled_is_trained(room: Room, tmp_path: Path, stream: bool) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text=" is 42.")
    started = room.start()
    asked: Any = {"model": "main", "max_tokens": 200, "messages": [*HELLO, {"role": "assistant", "content": "It"}]}
    with sdk_of(room, started) as sdk:
        if stream:
            with sdk.messages.stream(**asked) as events:
                answer: Any = events.get_final_message()
        else:
            answer = sdk.messages.create(**asked)
    assert answer.content[0].text == " is 42.", "the rest alone, as the API gives it"
    sent = room.engine.requests[-1]
    assert sent["continue_final_message"] is True and sent["add_generation_prompt"] is False
    [call] = room.calls(started)
    said = [3 + byte for byte in b" is 42."]
    assert call.choices[0].completion_ids.tolist()[:-1] == said
    assert call.prompt_ids.tolist()[-2:] == [3 + byte for byte in b"It"]
    config = from_tree({"policies": {"main": {"engine": room.engine.url}}}, base_dir=tmp_path)
    trace = room.trace(started)
    attempt, rollout = replace(trace.attempt, outcome=Outcome.COMPLETED), replace(trace.rollout, reward=1.0)
    assembly = assemble_for(config, [replace(trace, attempt=attempt, rollout=rollout)])
    assert assembly.trained == assembly.sampled == len(said) + 1


def test_a_begun_answer_that_comes_back_whole_extends_the_same_conversation(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text=" is 42.")
    started = room.start()
    post(room, started, messages=[*HELLO, {"role": "assistant", "content": "It"}])
    post(room, started, messages=[*HELLO, {"role": "assistant", "content": "It is 42."}, *HELLO])
    first, second = room.calls(started)
    seen = [*first.prompt_ids, *first.choices[0].completion_ids]
    assert second.prompt_ids.tolist()[: len(seen)] == seen


@pytest.mark.parametrize(
    ("content", "more"),
    [
        ("The ", {}),
        ("", {}),
        ([], {}),
        ([{"type": "tool_use", "id": "a", "name": "f", "input": {}}], {}),
        ([{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "It"}], {}),
        ("It", {"thinking": ENABLED}),
    ],
)
def test_an_answer_that_cannot_be_begun_so_is_refused_by_name(room: Room, content: Any, more: dict[str, Any]) -> None:
    before = len(room.engine.requests)
    answer = post(room, room.start(), messages=[*HELLO, {"role": "assistant", "content": content}], **more)
    assert (answer.status, answer.error["field"]) == (400, "messages[1]"), answer.raw
    assert len(room.engine.requests) == before


def test_tokens_are_counted_with_thinking_and_with_what_is_begun(room: Room) -> None:
    started = room.start()
    begun = {"max_tokens": None, "messages": [*HELLO, {"role": "assistant", "content": "It"}]}
    whole = {"max_tokens": None, "messages": HELLO, "thinking": ENABLED}
    counts = [post(room, started, "/v1/messages/count_tokens", **body) for body in (begun, whole)]
    assert [answer.status for answer in counts] == [200, 200], counts
    assert counts[0].json["input_tokens"] == counts[1].json["input_tokens"] + 2


def test_sglang_gets_the_same_without_the_field_it_does_not_have(tmp_path_factory: pytest.TempPathFactory) -> None:
    policy = {"engine_kind": "sglang", "engine_features": FEATURES}
    with gateway_room(tmp_path_factory.mktemp("sglang"), {"policies": {"main": policy}}) as room:
        room.engine.behaviour.format = "sglang"
        room.engine.behaviour.reply = lambda body: Reply(text=" is 42.")
        started = room.start()
        answer = post(room, started, messages=[*HELLO, {"role": "assistant", "content": "It"}])
        assert answer.status == 200 and "add_generation_prompt" not in room.engine.requests[-1]
        assert room.calls(started)[0].refusal is None
        refused = post(room, started, thinking=ENABLED)
        assert (refused.status, refused.error["field"]) == (400, "thinking.budget_tokens")
        assert post(room, started, thinking={"type": "adaptive"}).status == 200
        assert room.engine.requests[-1]["chat_template_kwargs"]["enable_thinking"] is True


@pytest.fixture(scope="module")
def provided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    reply = Reply(reasoning="six times seven", text="42")
    with FakeEngine(Behaviour(reply=lambda body: reply)) as provider:
        price = {"usd_per_million": {"input": 1.0, "output": 2.0}}
        providers = {
            "claude": {"kind": "anthropic", "base_url": provider.url, **price},
            "gpt": {"kind": "openai", "base_url": provider.url + "/v1", **price},
        }
        common = {"engine": "", "engine_features": ["reasoning"]}
        policies = {
            "main": {"model": "claude-1", "provider": "claude", **common},
            "other": {"model": "gpt-1", "provider": "gpt", **common},
        }
        with gateway_room(tmp_path_factory.mktemp("provided"), {"policies": policies, "providers": providers}) as room:
            room.engine = provider
            yield room


@pytest.mark.parametrize("stream", [False, True])
def test_a_foreign_signature_goes_back_to_its_provider_unchanged(provided: Room, stream: bool) -> None:
    started = provided.start()
    asked: Any = {"model": "main", "max_tokens": 200, "thinking": ENABLED}
    with sdk_of(provided, started) as sdk:
        if stream:
            with sdk.messages.stream(messages=HELLO, **asked) as events:
                first: Any = events.get_final_message()
        else:
            first = sdk.messages.create(messages=HELLO, **asked)
        thinking, redacted, text = first.content
        assert (thinking.thinking, redacted.type, text.text) == ("six times seven", "redacted_thinking", "42")
        assert len(thinking.signature) == 24, "the provider's own"
        history = [*HELLO, {"role": "assistant", "content": first.content}, *HELLO]
        sdk.messages.create(messages=history, **asked)  # the provider refuses a signature that is not its own
    sent = provided.engine.requests[-1]
    assert sent["thinking"] == ENABLED
    assert [block["type"] for block in sent["messages"][1]["content"]] == ["thinking", "redacted_thinking", "text"]
    assert sent["messages"][1]["content"][0]["signature"] == thinking.signature
    whole = provided.calls(started)[0].response
    assert whole is not None and [block["type"] for block in whole["content"]] == [
        "thinking", "redacted_thinking", "text"
    ]  # fmt: skip


def test_thinking_of_another_engine_is_not_sent_to_a_provider(provided: Room) -> None:
    ours = {"type": "thinking", "thinking": "mine", "signature": "reasoning_content"}
    history = [*HELLO, {"role": "assistant", "content": [ours, {"type": "text", "text": "a"}]}, *HELLO]
    assert post(provided, provided.start(), messages=history).status == 200
    assert provided.engine.requests[-1]["messages"][1]["content"] == [{"type": "text", "text": "a"}]


def test_a_provider_goes_on_with_a_begun_answer_or_refuses_it_by_name(provided: Room) -> None:
    started = provided.start()
    history = [*HELLO, {"role": "assistant", "content": "It"}]
    assert post(provided, started, messages=history).status == 200
    assert provided.engine.requests[-1]["messages"][-1] == {
        "role": "assistant", "content": [{"type": "text", "text": "It"}]
    }  # fmt: skip
    before = len(provided.calls(started))
    for body, field in (({"messages": history}, "messages"), ({"thinking": {"type": "adaptive"}}, "thinking")):
        refused = post(provided, started, model="other", **body)
        assert (refused.status, refused.error["field"]) == (400, field), refused.raw
    assert len(provided.calls(started)) == before
    assert post(provided, started, model="other", thinking={"type": "disabled"}).status == 200


def test_an_amount_of_thinking_reaches_a_provider_from_chat_too(provided: Room) -> None:
    started = provided.start()
    chat = {"model": "main", "messages": HELLO}
    assert provided.chat(started, {**chat, "reasoning_effort": "low"}).status == 200
    assert provided.engine.requests[-1]["output_config"] == {"effort": "low"}
    refused = provided.chat(started, {**chat, "reasoning_effort": "minimal"})
    assert (refused.status, refused.error["field"]) == (400, "reasoning_effort")
