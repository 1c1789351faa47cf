"""One conversation through Chat Completions, Responses and Messages, streaming and not, through the real gateway: the
engine reads the same, and what is trained is the same to the byte.

The conversation has a system prompt, parallel tool calls whose arguments are not written as a program would write
them, their results, and a turn after that.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anthropic
import pytest
from tests.contract.gateway_room import Room, gateway_room

from leyden.base.records import Outcome
from leyden.testing.running import Started
from leyden.testing.scripted import Reply
from leyden.traces.assemble import assemble

SYSTEM, QUESTION, FOLLOW_UP = "Answer from the table.", "How many \u00e9tudes?", [{"text": "And"}, {"text": "why?"}]
CALLS = (("run_sql", '{"q":"SELECT 1",  "limit": 1.0, "deep": {"7": [12345678901234567890]}}'), ("look", "{}"))
RESULTS = ["42", "nothing"]
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
SCRIPT = (
    Reply(reasoning="count them", text="Let me look.", tool_calls=CALLS),
    Reply(text="Forty-two."),
    Reply(reasoning="why", text="Because."),
)


def through_chat(room: Room, started: Started, stream: bool) -> None:
    sdk = room.sdk(started)
    tools: Any = [
        {"type": "function", "function": {"name": name, "description": name, "parameters": SCHEMA}} for name, _ in CALLS
    ]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]

    def turn() -> None:
        if stream:
            # `stream_options` as agents send it; the helper of the SDK puts the message together.
            with sdk.chat.completions.stream(model="main", messages=messages, tools=tools) as events:
                message: Any = events.get_final_completion().choices[0].message
        else:
            message = sdk.chat.completions.create(model="main", messages=messages, tools=tools).choices[0].message
        said = {"role": "assistant", "content": message.content}
        if getattr(message, "reasoning_content", None):
            said["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            said["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in message.tool_calls
            ]
        messages.append(said)

    turn()
    for call, result in zip(messages[-1]["tool_calls"], RESULTS, strict=True):
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    turn()
    messages.append({"role": "user", "content": [{"type": "text", **part} for part in FOLLOW_UP]})
    turn()


def through_responses(room: Room, started: Started, stream: bool, continued: bool = False) -> None:
    sdk = room.sdk(started)
    tools: Any = [{"type": "function", "name": name, "description": name, "parameters": SCHEMA} for name, _ in CALLS]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    previous: dict[str, Any] = {}

    def turn() -> Any:
        given: Any = {"model": "main", "instructions": SYSTEM, "input": list(items), "tools": tools, **previous}
        if stream:
            with sdk.responses.stream(**given) as events:
                answer: Any = events.get_final_response()
        else:
            answer = sdk.responses.create(**given)
        if continued:
            items.clear()
            previous["previous_response_id"] = answer.id
        else:
            items.extend(item.model_dump(exclude={"parsed_arguments", "parsed"}) for item in answer.output)
        return answer

    calls = [item for item in turn().output if item.type == "function_call"]
    for call, result in zip(calls, RESULTS, strict=True):
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    turn()
    items.append({"role": "user", "content": [{"type": "input_text", **part} for part in FOLLOW_UP]})
    turn()


def through_continued_responses(room: Room, started: Started, stream: bool) -> None:
    through_responses(room, started, stream, continued=True)


def through_messages(room: Room, started: Started, stream: bool) -> None:
    base_url = started.base_url(room.url).replace("/openai/v1", "/anthropic")
    tools: Any = [{"name": name, "description": name, "input_schema": SCHEMA} for name, _ in CALLS]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with anthropic.Anthropic(base_url=base_url, api_key=started.token, max_retries=0) as sdk:

        def turn() -> Any:
            given: Any = {
                "model": "main",
                "max_tokens": 400,
                "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
                "messages": messages,
                "tools": tools,
            }
            if stream:
                with sdk.messages.stream(**given) as events:
                    answer: Any = events.get_final_message()
            else:
                answer = sdk.messages.create(**given)
            # What a harness in any language does between two calls: it reads the JSON and writes it again.
            messages.append({"role": "assistant", "content": json.loads(answer.to_json())["content"]})
            return answer

        calls = [block for block in turn().content if block.type == "tool_use"]
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": result}]}
            for call, result in zip(calls, RESULTS, strict=True)
        ]
        messages.append({"role": "user", "content": results})
        turn()
        messages.append({"role": "user", "content": [{"type": "text", **part} for part in FOLLOW_UP]})
        turn()


WAYS: Mapping[str, Callable[[Room, Started, bool], None]] = {
    "chat": through_chat,
    "responses": through_responses,
    "previous_response_id": through_continued_responses,
    "messages": through_messages,
}


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    policy = {"sampling": {"max_tokens": 400}}
    with gateway_room(tmp_path_factory.mktemp("parity"), {"policies": {"main": policy}}) as room:
        yield room


def played(room: Room, way: str, stream: bool) -> tuple[Started, list[dict[str, Any]]]:
    """(the attempt, the bodies that the engine got)."""
    room.engine.behaviour.reply = lambda body: SCRIPT[
        sum(message["role"] == "assistant" for message in body["messages"]) % len(SCRIPT)
    ]
    started = room.start(seed=7)
    before = len(room.engine.requests)
    WAYS[way](room, started, stream)
    return started, list(room.engine.requests)[before:]


@pytest.fixture(scope="module")
def reference(room: Room) -> tuple[Started, list[dict[str, Any]]]:
    return played(room, "chat", False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_every_dialect_gives_the_engine_and_the_learner_the_same_bytes(
    room: Room, reference: tuple[Started, list[dict[str, Any]]], way: str, stream: bool
) -> None:
    started, bodies = played(room, way, stream)
    for body, expected in zip(bodies, reference[1], strict=True):
        for key in ("stream", "stream_options"):
            body.pop(key, None)
        assert json.dumps(body["messages"], sort_keys=True) == json.dumps(expected["messages"], sort_keys=True)
        assert json.dumps(body["tools"]) == json.dumps(expected["tools"]), "templates render keys in their order"
        assert body.keys() == expected.keys() and body["seed"] == expected["seed"]
    for call, expected_call in zip(room.calls(started), room.calls(reference[0]), strict=True):
        assert call.prompt_ids.tobytes() == expected_call.prompt_ids.tobytes()
        assert call.refusal is None and expected_call.refusal is None
        for choice, wanted in zip(call.choices, expected_call.choices, strict=True):
            assert choice.completion_ids.tobytes() == wanted.completion_ids.tobytes()
            assert choice.logprobs.tobytes() == wanted.logprobs.tobytes()
            assert (choice.finish_reason, choice.text) == (wanted.finish_reason, wanted.text)
    assert trained(room, started) == trained(room, reference[0])


def trained(room: Room, started: Started) -> list[tuple[Any, ...]]:
    """What would be trained, as bytes, had the attempt ended well. Every turn extends the one before."""
    trace = room.trace(started)
    ended = replace(
        trace,
        attempt=replace(trace.attempt, outcome=Outcome.COMPLETED),
        rollout=replace(trace.rollout, reward=1.0, outcome=Outcome.COMPLETED),
    )
    assembled = assemble([ended], policy="main", trainable_outcomes={Outcome.COMPLETED: "train"})
    assert assembled.trained == assembled.sampled > 0 and len(assembled.kept) == len(SCRIPT)
    for earlier, later in pairwise(assembled.kept):
        seen = [*earlier.prompt_ids, *earlier.completion_ids]
        assert list(later.prompt_ids[: len(seen)]) == seen
    return [
        (action.prompt_ids.tobytes(), action.completion_ids.tobytes(), action.logprobs.tobytes(), action.temperature)
        for action in assembled.kept
    ]
