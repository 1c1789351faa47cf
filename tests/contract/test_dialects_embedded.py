"""The embedded engine answers every dialect: same conversation, same seeds, same tokens; counts are those it reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.gateway_room import Room, gateway_room
from tests.unit.learning.backends.sampler_model import build

from leyden.learning.backends.embedded.chat import ChatFormat
from leyden.learning.backends.embedded.model import load_model
from leyden.learning.backends.embedded.sampler import Sampler
from leyden.learning.backends.embedded.server import EngineServer
from leyden.testing.running import Started

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("embedded")
    loaded = load_model(build(folder), dtype="float32", max_context=256)
    sampler = Sampler(loaded, version=3, seed=5)
    server = EngineServer("main", sampler, ChatFormat(loaded), tool_parser="hermes", default_max_tokens=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_ENGINE_KEY", server.key)
        policy = {
            "engine": server.start(), "engine_key_env": "TINY_ENGINE_KEY", "sampling": {"max_tokens": 12},
            "engine_features": ["reasoning"],
        }  # fmt: skip
        with gateway_room(folder, {"policies": {"main": policy}}) as room:
            yield room
    server.close()
    sampler.close()


def ask(room: Room, started: Started, path: str, **body: Any) -> Any:
    family = "anthropic" if path.startswith("messages") else "openai"
    where = started.base_url("").replace("/openai/", f"/{family}/")
    answer = room.request("POST", f"{where}/{path}", {"model": "main", **body}, key=started.token)
    assert answer.status == 200, answer.raw
    return answer.json


def through_chat(room: Room, started: Started) -> None:
    messages: list[Any] = [{"role": "developer", "content": "s"}, USER]
    messages.append(ask(room, started, "chat/completions", messages=messages)["choices"][0]["message"])
    ask(room, started, "chat/completions", messages=[*messages, USER])


def through_responses(room: Room, started: Started) -> None:
    first = ask(room, started, "responses", instructions="s", input="hi")
    ask(room, started, "responses", instructions="s", input=[USER], previous_response_id=first["id"])


def through_messages(room: Room, started: Started) -> None:
    asked: dict[str, Any] = {"system": "s", "max_tokens": 12}
    first = ask(room, started, "messages", messages=[USER], **asked)
    history = [USER, {"role": "assistant", "content": first["content"]}, USER]
    second = ask(room, started, "messages", messages=history, **asked)
    counted = ask(room, started, "messages/count_tokens", messages=history, system="s")
    assert counted["input_tokens"] == second["usage"]["input_tokens"]


def test_every_dialect_samples_the_same_tokens_from_the_embedded_engine(room: Room) -> None:
    sampled = []
    for lead in (through_chat, through_responses, through_messages):
        started = room.start(seed=11, policy_versions={"main": 3})
        lead(room, started)
        calls = room.calls(started)
        assert [call.refusal for call in calls] == [None, None]
        sampled.append(
            [
                (call.prompt_ids.tobytes(), choice.completion_ids.tobytes(), choice.logprobs.tobytes())
                for call in calls
                for choice in call.choices
            ]
        )
    assert sampled[0] == sampled[1] == sampled[2] and len(sampled[0]) == 2


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("chat/completions", {"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
        (
            "responses",
            {
                "input": "hi",
                "tools": [{"type": "function", "name": "f", "parameters": {}}],
                "tool_choice": {"type": "function", "name": "f"},
            },
            "tool_choice",
        ),
        ("messages", {"messages": [USER], "max_tokens": 3, "output_config": {"effort": "low"}}, "reasoning_effort"),
        ("messages", {"messages": [USER], "max_tokens": 3, "thinking": {"type": "adaptive"}}, "no switch for thinking"),
        (
            "messages",
            {"messages": [USER], "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 3}},
            "thinking.budget_tokens",
        ),
    ],
)
def test_what_the_embedded_engine_cannot_do_is_a_named_400(
    room: Room, path: str, body: dict[str, Any], field: str
) -> None:
    started = room.start(policy_versions={"main": 3})
    where = started.base_url("").replace("/openai/", "/anthropic/" if path == "messages" else "/openai/")
    answer = room.request("POST", f"{where}/{path}", {"model": "main", **body}, key=started.token)
    assert answer.status == 400 and field.split(".")[-1] in answer.error["message"], answer.raw


def test_a_begun_message_goes_on_as_prompt_and_the_rest_is_what_is_trained(room: Room) -> None:
    started = room.start(seed=11, policy_versions={"main": 3})
    asked: dict[str, Any] = {"max_tokens": 12}
    ask(room, started, "messages", messages=[USER], **asked)
    begun = [USER, {"role": "assistant", "content": "It is"}]
    rest = ask(room, started, "messages", messages=begun, **asked)
    counted = ask(room, started, "messages/count_tokens", messages=begun)
    fresh, call = room.calls(started)
    assert call.prompt_ids.tolist()[: len(fresh.prompt_ids)] == fresh.prompt_ids.tolist()
    assert len(call.prompt_ids) == len(fresh.prompt_ids) + len("It is") == counted["input_tokens"]
    assert call.refusal is None and len(call.choices[0].completion_ids) == rest["usage"]["output_tokens"]
    assert len(call.choices[0].logprobs) == len(call.choices[0].completion_ids)
    assert not rest["content"][0]["text"].startswith("It is"), "what was begun is not said again"


def test_switching_thinking_off_is_taken_by_a_template_without_a_switch(room: Room) -> None:
    started = room.start(seed=11, policy_versions={"main": 3})
    for thinking in ({}, {"thinking": {"type": "disabled"}}):
        ask(room, started, "messages", messages=[USER], max_tokens=12, **thinking)
    first, second = room.calls(started)
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
