"""A prompt policy at the gateway: the engine reads the version's texts, and the record has both."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.gateway_room import Room, gateway_room

from leyden.base.prompts import as_read, make_slot, slots_to_json
from leyden.base.records import PolicyVersion
from leyden.store import ledger

SYSTEM = {"role": "system", "content": "Answer about {t}."}
USER = {"role": "user", "content": "hi"}


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    with gateway_room(tmp_path) as opened:
        yield opened


def register(room: Room, version: int, *slots: Any, serve: bool = False) -> None:
    def job(connection: Any) -> None:
        record = PolicyVersion(policy="main", version=version, kind="prompt", prompts=slots_to_json(slots))
        ledger.add_policy_version(connection, room.store, record)
        if serve:
            ledger.set_serving(connection, room.store, "main", version)

    room.store.write(job).result(10)


BETTER = make_slot("system", "Answer about {{t}}.", "Answer {{well}}.")


def test_the_pinned_version_decides_what_the_engine_reads_and_both_texts_are_kept(room: Room) -> None:
    register(room, 1, BETTER, make_slot("other", "Never sent."))
    started = room.start(policy_versions={"main": 1})
    answer = room.chat(started, {"model": "main", "messages": [SYSTEM, USER]})
    assert answer.status == 200
    assert answer.headers["x-leyden-policy"] == "main@1"
    assert "prompt:system" in answer.headers["x-leyden-rewrites"].split(",")
    read = room.engine.requests[-1]["messages"]
    assert read == [{"role": "system", "content": "Answer {well}."}, USER]
    call = room.calls(started)[0]
    assert call.request["messages"] == [SYSTEM, USER]
    assert as_read(call.request, call.slots["texts"])["messages"] == read
    assert call.slots["filled"] == ["system"] and call.slots["unmatched"] == ["other"]
    assert "prompt:system" in call.rewrites and call.policy_version == 1


def test_other_versions_are_left_alone(room: Room) -> None:
    register(room, 1, BETTER)
    for versions in ({"main": 0}, {"main": 2}, {}):
        started = room.start(policy_versions=versions)
        answer = room.chat(started, {"model": "main", "messages": [SYSTEM, USER]})
        assert "prompt:" not in answer.headers["x-leyden-rewrites"]
        assert room.engine.requests[-1]["messages"][0] == SYSTEM
        assert room.calls(started)[0].slots == {}


def test_a_version_that_is_registered_late_is_seen(room: Room) -> None:
    started = room.start(policy_versions={"main": 3})
    room.chat(started, {"model": "main", "messages": [SYSTEM, USER]})
    register(room, 3, BETTER)
    room.chat(started, {"model": "main", "messages": [SYSTEM, USER]})
    assert [r["messages"][0]["content"] for r in room.engine.requests] == [SYSTEM["content"], "Answer {well}."]


def test_live_calls_read_the_prompts_of_the_serving_version(room: Room) -> None:
    register(room, 4, BETTER, serve=True)
    answer = room.admin("POST", "/v1/chat/completions", {"model": "main", "messages": [SYSTEM, USER]})
    assert answer.headers["x-leyden-policy"] == "main@4"
    assert room.engine.requests[-1]["messages"][0]["content"] == "Answer {well}."


def test_a_stream_is_relayed_as_ever_and_tools_are_described_anew(room: Room) -> None:
    register(room, 1, make_slot("look", "Looks.", "Looks twice.", where="tool", tool="look"))
    started = room.start(policy_versions={"main": 1})
    tools: Any = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]
    sdk = room.sdk(started)
    messages: Any = [USER]
    chunks = list(sdk.chat.completions.create(model="main", messages=messages, tools=tools, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "ok"
    assert room.engine.requests[-1]["tools"][0]["function"]["description"] == "Looks twice."
    assert room.calls(started)[0].request["tools"][0]["function"]["description"] == "Looks."


def test_a_text_of_a_completions_call_can_be_a_slot(room: Room) -> None:
    register(room, 1, make_slot("text", "Say {word}:", "Say {word} now:", where="prompt", part=True))
    started = room.start(policy_versions={"main": 1})
    body = {"model": "main", "prompt": "Please. Say {hello}: "}
    assert room.request("POST", started.base_url("") + "/completions", body, key=started.token).status == 200
    assert room.engine.requests[-1]["prompt"] == "Please. Say {hello} now: "


def test_a_slot_that_fits_two_messages_is_refused_by_name_and_nothing_is_sent(room: Room) -> None:
    register(room, 1, BETTER)
    started = room.start(policy_versions={"main": 1})
    answer = room.chat(started, {"model": "main", "messages": [SYSTEM, USER, SYSTEM]})
    assert answer.status == 422 and answer.error["type"] == "slot_conflict"
    assert "slot 'system' matches messages[0].content and messages[2].content" in answer.error["message"]
    assert len(room.engine.requests) == 0


def test_equal_requests_that_an_sdk_retries_are_one_call_with_prompts_too(room: Room) -> None:
    register(room, 1, BETTER)
    started = room.start(policy_versions={"main": 1})
    body = {"model": "main", "messages": [SYSTEM, USER]}
    room.chat(started, body)
    room.chat(started, body, x_stainless_retry_count="1")
    assert len(room.engine.requests) == 1
