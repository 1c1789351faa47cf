"""What every dialect does with bad bodies and with engines at fault: refused, recorded and told in its own shape."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from tests.contract.gateway_room import HELLO, Answer, Room, gateway_room

from leyden.base.records import Call
from leyden.gateway.dialects import BY_NAME
from leyden.testing.running import Started
from leyden.testing.scripted import Faults, Reply

BODIES: Mapping[str, dict[str, Any]] = {
    "openai_chat": {"model": "main", "messages": HELLO},
    "openai_completions": {"model": "main", "prompt": "hi"},
    "openai_responses": {"model": "main", "input": "hi"},
    "anthropic": {"model": "main", "max_tokens": 64, "messages": HELLO},
}


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    with gateway_room(tmp_path_factory.mktemp("faults")) as room:
        for name in BODIES:  # brings the probes
            assert post(room, room.start(), name).status == 200
        yield room


@pytest.fixture(autouse=True)
def plain_engine(room: Room) -> None:
    room.engine.behaviour.reply = lambda body: Reply(text="a longer answer")
    room.engine.behaviour.faults = Faults()


def test_every_dialect_is_here() -> None:
    assert set(BODIES) == set(BY_NAME)


def post(room: Room, started: Started, name: str, raw: bytes | None = None, **body: Any) -> Answer:
    dialect = BY_NAME[name]
    path = started.base_url("").replace("/openai/", f"/{dialect.family}/") + f"/{dialect.path}"
    told: Any = {**BODIES[name], **body} if raw is None else raw
    return room.request("POST", path, told, key=started.token)


def last(room: Room, started: Started) -> Call:
    return room.calls(started)[-1]


def check_shape(name: str, answer: Answer) -> None:
    """An error in the shape of the dialect."""
    assert answer.error["message"] and isinstance(answer.error["type"], str)
    assert (answer.json.get("type") == "error") == (name == "anthropic")
    assert ("param" in answer.error) == (name != "anthropic")


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(
    ("raw", "status"), [(b"[1]", 422), (b'"x"', 422), (b"null", 422), (b"{", 400), (b"", 400), (b"\xff", 400)]
)
def test_a_body_that_is_no_object_is_refused(room: Room, name: str, raw: bytes, status: int) -> None:
    answer = post(room, room.start(), name, raw)
    assert answer.status == status and "object" in answer.error["hint"]
    check_shape(name, answer)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("value", [3, True, [3], {"a": []}, "x"])
@pytest.mark.parametrize("field", ["model", "messages", "prompt", "input", "temperature", "tools", "stream", "top_p"])
def test_a_value_of_any_wrong_type_is_refused_or_right_and_never_a_fault_of_ours(
    room: Room, name: str, field: str, value: Any
) -> None:
    answer = post(room, room.start(), name, **{field: value})
    assert answer.status in (200, 400, 404), answer.raw
    if answer.status != 200:
        check_shape(name, answer)
        assert answer.error.get("field", "").split("[")[0].split(".")[0] == field


@pytest.mark.parametrize("name", BODIES)
def test_an_unknown_model_is_answered_with_the_names_that_are_known(room: Room, name: str) -> None:
    answer = post(room, room.start(), name, model="gpt-9")
    assert answer.status == 404 and answer.error["hint"] == "known: main"
    check_shape(name, answer)


@pytest.mark.parametrize("name", BODIES)
def test_a_field_that_nobody_knows_is_refused_by_name(room: Room, name: str) -> None:
    answer = post(room, room.start(), name, wand="phoenix")
    assert (answer.status, answer.error["field"]) == (400, "wand")
    check_shape(name, answer)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(
    ("faults", "status"),
    [
        (Faults(status=400), 400),
        (Faults(status=500), 502),
        (Faults(drop=True), 502),
        (Faults(no_json=True), 502),
        (Faults(cut_after_bytes=50), 502),
        (Faults(extra_choices=1), 502),
    ],
)
def test_a_fault_of_the_engine_is_recorded_and_told(room: Room, name: str, faults: Faults, status: int) -> None:
    room.engine.behaviour.faults = faults
    started = room.start()
    answer = post(room, started, name)
    assert answer.status == status
    check_shape(name, answer)
    call = last(room, started)
    assert (call.status, call.http_status) == ("error", status) and call.error
    assert len(call.choices) == (2 if faults.extra_choices else 0), "what was sampled is recorded, trained never"


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(
    "faults",
    [
        Faults(error_in_stream=True),
        Faults(cut_after_bytes=2000),
        Faults(no_done=True),
        Faults(extra_choices=1),
    ],
)
def test_a_stream_that_breaks_ends_in_an_error_of_the_dialect(room: Room, name: str, faults: Faults) -> None:
    room.engine.behaviour.faults = faults
    started = room.start()
    answer = post(room, started, name, stream=True)
    assert answer.status == 200
    end = answer.raw.rstrip().rpartition(b"\n\n")[2]
    if name == "openai_responses":
        assert end.startswith(b"event: response.failed\n") and b'"status":"failed"' in end
    elif name == "anthropic":
        assert end.startswith(b'event: error\ndata: {"type":"error","error":{"type":"api_error"')
    else:
        assert end.startswith(b'data: {"error":{')
    for sign in (b"[DONE]", b"response.completed", b"message_stop"):
        assert sign not in answer.raw
    call = last(room, started)
    assert call.status == "error" and call.error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(
    ("faults", "refusal"),
    [
        (Faults(wrong_usage=True), "usage_mismatch"),
        (Faults(nan_logprob=True), "bad_logprob"),
        (Faults(missing=frozenset({"logprobs"})), "missing_logprobs"),
        (Faults(missing=frozenset({"token_ids"})), "missing_completion_ids"),
        (Faults(missing=frozenset({"prompt_token_ids"})), "missing_prompt_ids"),
        (Faults(missing_logprobs_of=1), "length_mismatch"),
    ],
)
def test_tokens_that_cannot_be_trusted_are_answered_and_refused_by_name(
    room: Room, name: str, faults: Faults, refusal: str, stream: bool
) -> None:
    room.engine.behaviour.faults = faults
    started = room.start()
    answer = post(room, started, name, stream=stream)
    assert answer.status == 200 and b"error" not in answer.raw.replace(b'"error":null', b"")
    call = last(room, started)
    assert (call.status, call.refusal) == ("ok", refusal)


@pytest.mark.parametrize("name", BODIES)
def test_a_retry_of_a_stream_is_replayed_and_ends_like_the_first(room: Room, name: str) -> None:
    started = room.start()
    first = post(room, started, name, stream=True)
    dialect = BY_NAME[name]
    path = started.base_url("").replace("/openai/", f"/{dialect.family}/") + f"/{dialect.path}"
    again = room.request("POST", path, {**BODIES[name], "stream": True}, key=started.token, x_stainless_retry_count="1")
    header = dialect.id_header.decode()
    assert again.headers["x-leyden-replayed"] == "1"
    assert again.headers[header] == first.headers[header] == last(room, started).id
    assert again.raw.rstrip().rpartition(b"data: ")[2][:40] == first.raw.rstrip().rpartition(b"data: ")[2][:40]
    assert len(room.calls(started)) == 1
