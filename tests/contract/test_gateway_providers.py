"""Providers and other engines behind the gateway: spoken to in their own format, priced, recorded, failing by name."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.contract.gateway_room import HELLO, Room, gateway_room

from leyden.base.records import Provenance
from leyden.gateway.upstream import CONNECT_PATIENCE_S
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.running import Started
from leyden.testing.scripted import Behaviour, Faults, Reply

SECRET = "sk-provider-secret"
PRICE = {"input": 3.0, "output": 15.0}


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    monkeypatch.setenv("LEYDEN_TEST_PROVIDER_KEY", SECRET)
    with FakeEngine(Behaviour(key=SECRET, format="openai")) as engine:
        yield engine


def tree(provider: FakeEngine, **more: Any) -> dict[str, Any]:
    one = {"key_env": "LEYDEN_TEST_PROVIDER_KEY", "usd_per_million": PRICE, **more}
    return {
        "providers": {
            "open": {**one, "kind": "openai", "base_url": provider.url + "/v1"},
            "claude": {**one, "kind": "anthropic", "base_url": provider.url},
        },
        "policies": {
            "open": {"provider": "open", "model": "gpt-x", "engine": ""},
            "claude": {"provider": "claude", "model": "claude-x", "engine": ""},
            "main": {},
        },
    }


@pytest.fixture
def room(tmp_path: Path, provider: FakeEngine) -> Iterator[Room]:
    with gateway_room(tmp_path, tree(provider)) as room:
        yield room


def ask(room: Room, started: Started, model: str, **more: Any) -> Any:
    return room.sdk(started).chat.completions.create(model=model, messages=HELLO, **more)


@pytest.mark.parametrize("model", ["open", "claude"])
def test_a_provider_answers_and_its_call_is_priced_and_never_trained(
    room: Room, provider: FakeEngine, model: str
) -> None:
    started = room.start()
    answer = ask(room, started, model)
    assert answer.choices[0].message.content == "ok" and answer.choices[0].finish_reason == "stop"
    assert provider.requests[-1]["model"] == ("gpt-x" if model == "open" else "claude-x")
    assert "return_token_ids" not in provider.requests[-1] and provider.num_probes == 0
    [call] = room.calls(started)
    assert call.status == "ok" and call.provenance is Provenance.RETOKENIZED and call.refusal is not None
    usage = call.usage
    assert usage["cost_usd"] == pytest.approx((usage["prompt_tokens"] * 3 + usage["completion_tokens"] * 15) / 1e6)
    assert usage["cost_usd"] > 0 and "cost_usd" not in (call.response or {})["usage"]
    assert "seed" not in call.sampling, "what is not sent is not said to have been used"


@pytest.mark.parametrize("model", ["open", "claude"])
def test_a_stream_of_a_provider_is_relayed_and_recorded_as_its_whole_twin(
    room: Room, provider: FakeEngine, model: str
) -> None:
    provider.behaviour.reply = lambda body: Reply(text="so: ", tool_calls=(("look", '{"q":1}'),))
    started = room.start()
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    ask(room, started, model, tools=[tool])
    chunks = list(ask(room, started, model, tools=[tool], stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "so: "
    whole, streamed = room.calls(started)
    assert whole.response is not None and streamed.response is not None
    [left], [right] = whole.response["choices"], streamed.response["choices"]
    assert left["finish_reason"] == right["finish_reason"] == "tool_calls"
    assert left["message"]["tool_calls"] == right["message"]["tool_calls"]
    assert left["message"]["tool_calls"][0]["function"]["arguments"] == '{"q":1}'
    assert whole.usage == streamed.usage


def test_the_key_goes_to_the_provider_and_nowhere_else(room: Room, provider: FakeEngine, tmp_path: Path) -> None:
    started = room.start()
    ask(room, started, "open")
    ask(room, started, "claude")
    assert provider.headers[0]["authorization"] == f"Bearer {SECRET}"
    assert provider.headers[1]["x-api-key"] == SECRET and "authorization" not in provider.headers[1]
    assert provider.headers[1]["anthropic-version"]
    assert started.token not in json.dumps(list(provider.headers))
    for path in tmp_path.iterdir():
        assert SECRET.encode() not in path.read_bytes()


def test_what_a_provider_cannot_honour_is_refused_before_anything_is_recorded(room: Room, provider: FakeEngine) -> None:
    started = room.start()
    with pytest.raises(openai.BadRequestError) as refused:
        ask(room, started, "claude", n=2)
    assert refused.value.param == "n"
    assert room.calls(started) == [] and list(provider.requests) == []


@pytest.mark.parametrize(
    ("status", "kind", "told"),
    [(401, "provider_authentication", 502), (404, "provider_refused", 404), (500, "provider_failed", 502)],
)
@pytest.mark.parametrize("model", ["open", "claude"])
def test_a_fault_of_a_provider_is_named_and_recorded(
    room: Room, provider: FakeEngine, status: int, kind: str, told: int, model: str
) -> None:
    provider.behaviour.faults = Faults(status=status)
    started = room.start()
    answer = room.chat(started, {"model": model, "messages": HELLO})
    assert (answer.status, answer.error["type"]) == (told, kind)
    assert SECRET not in answer.raw.decode() and "provider" in answer.error["message"]
    assert len(provider.requests) == 1
    [call] = room.calls(started)
    assert (call.status, call.http_status) == ("error", told)


def test_a_rate_limit_that_lasts_longer_than_we_wait_is_passed_on_with_its_retry_after(
    room: Room, provider: FakeEngine
) -> None:
    provider.behaviour.faults = Faults(status=429, retry_after_s=120)
    began = time.monotonic()
    answer = room.chat(room.start(), {"model": "open", "messages": HELLO})
    assert (answer.status, answer.error["type"]) == (429, "provider_rate_limited")
    assert answer.headers["retry-after"] == "120" and time.monotonic() - began < CONNECT_PATIENCE_S


def test_a_short_rate_limit_is_waited_for(room: Room, provider: FakeEngine) -> None:
    provider.behaviour.faults = Faults(status=429, retry_after_s=0, fail_first=1)
    started = room.start()
    assert room.chat(started, {"model": "open", "messages": HELLO}).status == 200
    assert len(provider.requests) == 2 and len(room.calls(started)) == 1


def test_a_provider_that_is_late_is_a_504_and_not_asked_again(tmp_path: Path, provider: FakeEngine) -> None:
    with gateway_room(tmp_path, tree(provider, timeout_s=0.3)) as room:
        provider.behaviour.delay_s = 20.0
        answer = room.chat(room.start(), {"model": "open", "messages": HELLO})
        assert (answer.status, answer.error["type"]) == (504, "provider_timeout")
        assert "providers.open.timeout_s" in answer.error["message"] and len(provider.requests) == 1


def test_sglang_returns_tokens_that_may_be_trained(tmp_path: Path) -> None:
    with gateway_room(tmp_path, {"policies": {"main": {"engine_kind": "sglang"}}}) as room:
        room.engine.behaviour.format = "sglang"
        started = room.start()
        ask(room, started, "main")
        text = "".join(c.choices[0].delta.content or "" for c in ask(room, started, "main", stream=True) if c.choices)
        assert text == "ok"
        calls = room.calls(started)
        for call in calls:
            assert call.provenance is Provenance.SERVED and call.refusal is None
            assert call.choices[0].completion_ids.tolist() == [3 + 111, 3 + 107, 2]
        assert calls[0].prompt_ids.tolist() == calls[1].prompt_ids.tolist() != []


def test_an_engine_of_another_kind_than_said_is_refused_with_the_flag_to_set(tmp_path: Path) -> None:
    with gateway_room(tmp_path) as room:
        room.engine.behaviour.format = "sglang"
        answer = room.chat(room.start(), {"model": "main", "messages": HELLO})
        assert (answer.status, answer.error["type"]) == (502, "engine_incapable")
        assert room.engine.url in answer.error["message"] and "return_token_ids" in answer.error["message"]


def test_an_old_sglang_is_refused_by_name(tmp_path: Path) -> None:
    with gateway_room(tmp_path, {"policies": {"main": {"engine_kind": "sglang"}}}) as room:
        room.engine.behaviour.format = "sglang"
        room.engine.behaviour.faults = Faults(missing=frozenset({"logprobs"}))
        answer = room.chat(room.start(), {"model": "main", "messages": HELLO})
        assert (answer.status, answer.error["type"]) == (502, "engine_incapable")
        assert "return_meta_info" in answer.error["message"]


def test_a_call_that_is_refused_takes_no_number(room: Room) -> None:
    started = room.start()
    ask(room, started, "main")
    assert room.chat(started, {"model": "claude", "messages": HELLO, "n": 2}).status == 400
    ask(room, started, "main")
    assert [call.seq for call in room.calls(started)] == [0, 1]
