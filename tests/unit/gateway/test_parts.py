"""The parts of the gateway that need no connection: addresses, sampling, hold, ledger, dialects."""

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.base.config import PolicyConfig, SamplingConfig
from leyden.base.errors import RequestRefused
from leyden.base.records import Rollout, Task
from leyden.gateway.address import read_address
from leyden.gateway.dialects import BY_NAME, DIALECTS
from leyden.gateway.hold import Hold
from leyden.gateway.ledger import Book, Flight, digest_of
from leyden.gateway.sampling import effective_sampling, seed_of
from leyden.gateway.stream import read_json
from leyden.testing.scripted import Faults, Reply
from leyden.testing.wire import Answer

CHAT: dict[str, Any] = {"model": "main", "messages": [{"role": "user", "content": "hi"}]}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("path", "rollout_id", "kind"),
    [
        ("/v1/chat/completions", None, "openai_chat"),
        ("/openai/v1/completions", None, "openai_completions"),
        ("/proxy/rollout/r1/attempt/a1/mode/train/openai/v1/chat/completions", "r1", "openai_chat"),
        ("/proxy/rollout/r1/attempt/a1/mode/val/v1/completions", "r1", "openai_completions"),
        ("/v1/responses", None, "openai_responses"),
        ("/proxy/rollout/r1/attempt/a1/mode/train/openai/v1/responses", "r1", "openai_responses"),
        ("/v1/messages", None, "anthropic"),
        ("/anthropic/v1/messages", None, "anthropic"),
        ("/proxy/rollout/r1/attempt/a1/mode/train/anthropic/v1/messages", "r1", "anthropic"),
    ],
)
def test_an_address_says_who_calls_and_how(path: str, rollout_id: str | None, kind: str) -> None:
    address = read_address(path)
    assert address is not None
    assert (address.rollout_id, address.dialect.name) == (rollout_id, kind)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/v1/chat/completions",
        "/chat/completions",
        "/proxy/rollout/r/attempt/a/mode/test/openai/v1/completions",
        "/v1/models",
        "/openai/v1/messages",
        "/anthropic/v1/chat/completions",
        "/v1/messages/count_tokens",
    ],
)
def test_other_paths_are_no_model_calls(path: str) -> None:
    assert read_address(path) is None


def rollout(**fields: Any) -> Rollout:
    return Rollout(id="r", task=Task(id="t"), **fields)


def test_a_model_without_configuration_is_served_as_asked() -> None:
    request = BY_NAME["openai_chat"].parse({**CHAT, "temperature": 0.3, "max_tokens": 7})
    used, rewrites = effective_sampling(request, None, None)
    assert used == {"temperature": 0.3, "top_p": 1.0, "max_tokens": 7} and rewrites == []


@given(
    st.none() | st.integers(1, 500),
    st.integers(1, 500),
    st.none() | st.floats(0, 2),
    st.floats(0, 2),
    st.booleans(),
)
def test_max_tokens_is_the_smaller_one_and_every_change_has_a_name(
    asked: int | None, own: int, hot: float | None, temperature: float, respect: bool
) -> None:
    body = {**CHAT, "max_tokens": asked, "temperature": hot}
    policy = PolicyConfig(respect_harness=respect, sampling=SamplingConfig(max_tokens=own, temperature=temperature))
    used, rewrites = effective_sampling(BY_NAME["openai_chat"].parse(body), policy, rollout())
    assert used["max_tokens"] == (own if asked is None else min(asked, own))
    assert used["temperature"] == (hot if respect and hot is not None else temperature)
    assert ("max_tokens" in rewrites) == (used["max_tokens"] != asked)
    assert ("temperature" in rewrites) == (used["temperature"] != (1.0 if hot is None else hot))


def test_seeds_differ_by_rollout_attempt_and_call() -> None:
    seeds = {seed_of(rollout, attempt, seq) for rollout in range(5) for attempt in range(3) for seq in range(20)}
    assert len(seeds) == 300 and all(0 <= seed < 2**31 for seed in seeds)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=5))
def test_the_digest_does_not_depend_on_the_order_of_keys(body: dict[str, Any]) -> None:
    assert digest_of("a", body) == digest_of("a", dict(reversed(list(body.items()))))
    assert digest_of("a", body) != digest_of("b", body)
    assert digest_of("a", {**body, "new-key": 1}) != digest_of("a", body)


def test_nan_is_let_in_so_that_it_can_be_refused_by_name() -> None:
    value = read_json(b'{"a": NaN, "b": -Infinity}')
    assert isinstance(value, dict) and value["a"] != value["a"]
    assert read_json(b"<html>") is None


BODIES: dict[str, dict[str, Any]] = {
    "openai_chat": {**CHAT, "logprobs": True, "stream_options": {"include_usage": True}},
    "openai_completions": {"model": "main", "prompt": "x", "logprobs": 1, "stream_options": {"include_usage": True}},
    "openai_responses": {"model": "main", "input": "hi"},
    "anthropic": {**CHAT, "max_tokens": 64},
}
"""A request of each dialect for a stream with all that an answer can have."""
SEVERAL = ("openai_chat", "openai_completions")
"""Dialects that can ask for several choices."""


@pytest.mark.parametrize(("name", "n"), [*((name, 1) for name in BODIES), *((name, 3) for name in SEVERAL)])
def test_chunks_of_an_answer_assemble_to_the_answer(name: str, n: int) -> None:
    dialect = BY_NAME[name]
    body = {**BODIES[name], "stream": True, **({"n": n} if n > 1 else {})}
    request = dialect.parse(body)
    engine_body = dialect.engine_body(request, request.asked, "main@0")
    answer = Answer(engine_body, [Reply(text="abc")] * n, Faults(), 1)
    assembly = dialect.assembly(request)
    for chunk in answer.chunks():
        assert not assembly.complete() or not chunk["choices"]
        assembly.add(chunk)
    assert assembly.complete()
    whole = answer.whole()
    assert dialect.capture(assembly.body()) == dialect.capture(whole)
    ours, theirs = (dialect.public(told, request, "call_1") for told in (assembly.body(), whole))
    for choice in theirs.get("choices", ()):
        for key in ("refusal", "tool_calls"):  # whole answers spell out that there are none
            choice.get("message", {}).pop(key, None)
    assert ours == theirs


def test_every_dialect_has_a_request_here() -> None:
    assert set(BODIES) == {dialect.name for dialect in DIALECTS}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_stored_answer_replays_to_itself(name: str) -> None:
    dialect = BY_NAME[name]
    request = dialect.parse({**BODIES[name], "stream": True})
    engine_body = dialect.engine_body(request, {}, "main@0")
    stored = dialect.public(Answer(engine_body, [Reply(text="abc")], Faults(), 1).whole(), request, "call_1")
    assembly = dialect.assembly(request)
    for event in dialect.replay(stored, request).split(b"\n\n")[:-2]:
        assembly.add(orjson.loads(event.removeprefix(b"data: ")))
    again = dialect.public(assembly.body(), request, "call_1")
    for answer in (stored, again):
        for choice in answer["choices"]:
            for key in ("refusal", "tool_calls"):
                choice.get("message", {}).pop(key, None)
    assert again == stored


async def test_a_hold_lets_go_in_one_go_and_counts() -> None:
    hold = Hold(10)
    hold.pause("why")
    waiting = [asyncio.ensure_future(hold.enter()) for _ in range(3)]
    await asyncio.sleep(0)
    assert (hold.waiting, hold.inflight) == (3, 0)
    hold.resume()
    await asyncio.gather(*waiting)
    assert (hold.waiting, hold.inflight) == (0, 3)
    assert not await hold.drained(0.001)
    for _ in range(3):
        hold.leave()
    assert await hold.drained(0.001)


async def test_a_hold_has_an_end() -> None:
    hold = Hold(0.01)
    hold.pause("weights")
    with pytest.raises(RequestRefused, match="weights") as caught:
        await hold.enter()
    assert caught.value.status == 503 and hold.waiting == 0 and hold.inflight == 0


class NoCalls:
    """A reader of an empty store."""

    def calls_of(self, attempt_id: str) -> list[Any]:
        return []

    def find_call(self, attempt_id: str, digest: str, occurrence: int) -> None:
        return None


async def test_a_retry_takes_the_call_whose_client_left() -> None:
    book, reader = Book("a"), NoCalls()
    first = await book.place(reader, "d", 0, True)  # type: ignore[arg-type]
    second = await book.place(reader, "d", 0, True)  # type: ignore[arg-type]
    assert isinstance(first, Flight) and isinstance(second, Flight) and first is not second
    for flight in (first, second):
        await book.number(reader, flight)  # type: ignore[arg-type]
    assert (first.occurrence, second.occurrence, first.seq, second.seq) == (0, 1, 0, 1)
    second.left()
    assert await book.place(reader, "d", 1, True) is second  # type: ignore[arg-type]
    assert (second.clients, second.retry_count, second.abort_reason) == (1, 1, None)
    first.left()
    assert await book.place(reader, "d", 1, True) is first  # type: ignore[arg-type]
    for flight in (first, second):
        book.close(flight)
        flight.finish()
    assert not book.busy


async def test_a_client_that_is_no_sdk_is_not_waited_for() -> None:
    flight = Flight("d", 0, False)
    flight.left()
    assert flight.abort_reason == "the client left"
    with pytest.raises(RequestRefused, match="left"):
        await flight.interruptible(asyncio.sleep(10))


async def test_live_calls_leave_nothing_behind() -> None:
    book = Book(None)
    for _ in range(3):
        flight = await book.place(NoCalls(), "d", 0, False)  # type: ignore[arg-type]
        assert isinstance(flight, Flight)
        await book.number(NoCalls(), flight)  # type: ignore[arg-type]
        book.close(flight)
    assert not book.busy and book._occurrences == {}
