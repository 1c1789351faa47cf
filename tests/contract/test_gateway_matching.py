"""Harnesses that send one model name for several policies: the system message and the tools say whose call it is."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.gateway_room import HELLO, Room, gateway_room

TREE: dict[str, Any] = {
    "policies": {
        "planner": {"match": {"system": "(?i)you plan"}, "sampling": {"max_tokens": 5}},
        "writer": {"match": {"system": "you write", "tools": ["edit", "read"]}, "sampling": {"max_tokens": 7}},
        "critic": {"match": {"tools": ["score"]}},
        "main": {},
    },
    "match": {"models": ["agent", "main"]},
}
FUNCTION = {"type": "object", "properties": {}}


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with gateway_room(tmp_path_factory.mktemp("matching"), copy.deepcopy(TREE)) as room:
        yield room


def body_of(system: str = "", tools: tuple[str, ...] = (), model: str = "agent", role: str = "system") -> Any:
    said = [{"role": role, "content": system}] if system else []
    offered = [{"type": "function", "function": {"name": name, "parameters": FUNCTION}} for name in tools]
    return {"model": model, "messages": [*said, *HELLO], **({"tools": offered} if tools else {})}


@pytest.mark.parametrize(
    ("body", "policy"),
    [
        (body_of("You PLAN the work."), "planner"),
        (body_of("You plan.", role="developer"), "planner"),
        (body_of([{"type": "text", "text": "Now you "}, {"type": "text", "text": "plan."}]), "planner"),  # type: ignore[arg-type]
        (body_of("you write", ("read", "edit", "other")), "writer"),
        (body_of("", ("score",)), "critic"),
        (body_of("you plan", model="main"), "planner"),
        (body_of("you plan", model="critic"), "critic"),
    ],
)
def test_a_call_for_a_shared_name_goes_to_the_policy_that_it_fits(room: Room, body: Any, policy: str) -> None:
    started = room.start(policy_versions=dict.fromkeys(TREE["policies"], 3))
    answer = room.chat(started, body)
    assert answer.status == 200, answer.raw
    assert answer.headers["x-leyden-policy"] == f"{policy}@3"
    assert answer.json["model"] == body["model"], "the harness is told the name that it asked for"
    call = room.calls(started)[0]
    assert (call.alias, call.policy, call.policy_version) == (body["model"], policy, 3)
    assert ("model" in call.rewrites) == (policy != body["model"])
    limit = {"planner": 5, "writer": 7, "critic": 256}[policy]
    assert call.sampling["max_tokens"] == limit, "it is sampled as that policy's section says"


def test_every_dialect_is_matched_by_the_same_rule(room: Room) -> None:
    started = room.start()
    prefix = started.base_url("").removesuffix("/openai/v1")
    tool = {"name": "score", "input_schema": FUNCTION}
    sent = {
        "/openai/v1/responses": {"model": "agent", "instructions": "you plan", "input": "hi"},
        "/anthropic/v1/messages": {"model": "agent", "system": "you plan", "messages": HELLO, "max_tokens": 9},
    }
    for path, body in sent.items():
        answer = room.request("POST", prefix + path, body, key=started.token)
        assert answer.status == 200, answer.raw
        assert answer.headers["x-leyden-policy"] == "planner@0", path
    body = {"model": "agent", "messages": HELLO, "max_tokens": 9, "tools": [tool]}
    answer = room.request("POST", prefix + "/anthropic/v1/messages", body, key=started.token)
    assert answer.headers["x-leyden-policy"] == "critic@0"
    body = {"model": "agent", "prompt": "you plan"}
    answer = room.request("POST", prefix + "/openai/v1/completions", body, key=started.token)
    assert (answer.status, answer.error["type"]) == (404, "no_match"), "text alone has no system message"


def test_a_call_that_fits_nothing_is_refused_with_the_matchers(room: Room) -> None:
    started = room.start()
    answer = room.chat(started, body_of("you write", ("edit",)))
    assert (answer.status, answer.error["type"], answer.error["param"]) == (404, "no_match", "model")
    for text in ("planner (system = '(?i)you plan')", "writer (system = 'you write', tools = ['edit', 'read'])",
                 "critic (tools = ['score'])", "it has system message 'you write', tools ['edit']"):  # fmt: skip
        assert text in answer.error["message"], text
    assert room.calls(started) == [], "nothing was sampled"


def test_a_call_that_fits_two_policies_is_refused_and_both_are_named(room: Room) -> None:
    answer = room.chat(room.start(), body_of("you plan", ("score",)))
    assert (answer.status, answer.error["type"]) == (422, "ambiguous_match")
    assert "planner (" in answer.error["message"] and "critic (" in answer.error["message"]
    assert "writer (" not in answer.error["message"]


def test_a_default_takes_what_fits_nothing_but_not_what_fits_two(tmp_path: Path) -> None:
    with gateway_room(tmp_path, {**copy.deepcopy(TREE), "match": {"models": ["agent"], "default": "main"}}) as room:
        started = room.start()
        assert room.chat(started, body_of("who are you?")).headers["x-leyden-policy"] == "main@0"
        assert room.chat(started, body_of("you plan", ("score",))).status == 422
        assert room.chat(started, body_of(model="agnet")).status == 404, "other unknown names stay unknown"


def test_shared_names_are_listed_and_a_retry_finds_its_answer(room: Room) -> None:
    started = room.start()
    listed = room.request("GET", started.base_url("") + "/models", key=started.token).json["data"]
    assert [one["id"] for one in listed] == ["agent", "critic", "main", "planner", "writer"]
    first = room.chat(started, body_of("you plan"))
    again = room.chat(started, body_of("you plan"), x_stainless_retry_count="1")
    assert again.headers["x-leyden-call"] == first.headers["x-leyden-call"]
    assert len(room.calls(started)) == 1
