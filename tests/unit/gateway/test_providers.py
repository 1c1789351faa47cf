"""The formats of engines and providers: translation there and back, prices, faults by name. No connection."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.base.config import PriceConfig, from_tree
from leyden.base.errors import ConfigError, ProviderError, RequestRefused
from leyden.gateway.dialects import BY_NAME
from leyden.gateway.providers import Provider, cost_usd
from leyden.gateway.providers.anthropic import Anthropic, MessageStream
from leyden.gateway.providers.base import chunks_of
from leyden.gateway.providers.faults import fault_of, retry_after_of
from leyden.gateway.providers.openai import OpenAI
from leyden.gateway.providers.sglang import SGLang
from leyden.gateway.routing import Router
from leyden.gateway.stream import Relay
from leyden.store import open_store

CHAT = BY_NAME["openai_chat"]
PATH = "chat/completions"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Look up", "parameters": {"type": "object", "properties": {}}},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "one"},
    {"role": "user", "content": [{"type": "text", "text": "two"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "found"},
    {"role": "user", "content": "and?"},
]


def engine_body(body: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    request = CHAT.parse({"model": "a", **body})
    used = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 64, **request.asked}
    return CHAT.engine_body(request, used, "model-id"), request


def test_a_conversation_with_tools_becomes_alternating_messages() -> None:
    body, request = engine_body(
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "stop": "END", "temperature": 0.5}
    )
    sent = Anthropic().body(PATH, body, request)
    assert sent == {
        "model": "model-id", "max_tokens": 64, "system": "Be short.", "temperature": 0.5, "stop_sequences": ["END"],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"q": 1}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "found"},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        "tools": [{"name": "look", "input_schema": TOOL["function"]["parameters"], "description": "Look up"}],
        "tool_choice": {"type": "any"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "parallel", "made"),
    [
        (None, None, {"type": "auto"}),
        ("none", False, {"type": "none"}),
        ("auto", False, {"type": "auto", "disable_parallel_tool_use": True}),
        ({"type": "function", "function": {"name": "look"}}, None, {"type": "tool", "name": "look"}),
    ],
)
def test_tool_choice_is_translated(choice: Any, parallel: bool | None, made: dict[str, Any]) -> None:
    body, request = engine_body(
        {"messages": MESSAGES[:2], "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": parallel}
    )
    assert Anthropic().body(PATH, body, request)["tool_choice"] == made


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"seed": 3}, "seed"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": "no json"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_messages_cannot_honour_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    body, request = engine_body({"messages": MESSAGES[:2], **change})
    with pytest.raises(RequestRefused) as refused:
        Anthropic().body(PATH, body, request)
    assert refused.value.field == field and refused.value.hint


def test_completions_of_text_are_no_messages() -> None:
    with pytest.raises(RequestRefused, match="completions"):
        Anthropic().body("completions", {"model": "m", "prompt": "x"}, None)


MESSAGE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x",
    "content": [
        {"type": "thinking", "thinking": "Hmm.", "signature": "s"},
        {"type": "redacted_thinking", "data": "sealed"},
        {"type": "text", "text": "Look: "},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"q": "\u00e9"}},
        {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
    ],
    "stop_reason": "tool_use", "stop_sequence": None,
    "usage": {
        "input_tokens": 10, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20, "output_tokens": 7
    },
}  # fmt: skip


def events() -> bytes:
    """The same message as Anthropic documents its stream."""
    start = {**MESSAGE, "content": [], "stop_reason": None, "usage": {**MESSAGE["usage"], "output_tokens": 1}}  # type: ignore[dict-item]
    parts: list[dict[str, Any]] = [{"type": "message_start", "message": start}, {"type": "ping"}]
    for index, (block, deltas) in enumerate([
        ({"type": "thinking", "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": "Hmm."}, {"type": "signature_delta", "signature": "s"},
        ]),
        ({"type": "redacted_thinking", "data": "sealed"}, []),
        ({"type": "text", "text": ""}, [
            {"type": "text_delta", "text": "Look"}, {"type": "text_delta", "text": ": "},
        ]),
        ({"type": "tool_use", "id": "t1", "name": "look", "input": {}}, [
            {"type": "input_json_delta", "partial_json": ""},
            {"type": "input_json_delta", "partial_json": '{"q":'},
            {"type": "input_json_delta", "partial_json": '"\u00e9"}'},
        ]),
        ({"type": "tool_use", "id": "t2", "name": "look", "input": {}}, [
            {"type": "input_json_delta", "partial_json": "{}"},
        ]),
    ]):  # fmt: skip
        parts.append({"type": "content_block_start", "index": index, "content_block": block})
        parts += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        parts.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": "tool_use", "stop_sequence": None}
    parts.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 7}})
    parts.append({"type": "message_stop"})
    return b"".join(f"event: {part['type']}\n".encode() + b"data: " + orjson.dumps(part) + b"\n\n" for part in parts)


def test_a_message_becomes_a_chat_completion() -> None:
    answer = Anthropic().answer(PATH, dict(MESSAGE))
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Look: " and choice["message"]["reasoning_content"] == "Hmm."
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"q":"\u00e9"}', "{}"]
    assert answer["usage"]["prompt_tokens"] == 130 and answer["usage"]["completion_tokens"] == 7
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 100, "cache_creation_tokens": 20}


def assembled(stream: bytes) -> dict[str, Any]:
    relay = Relay(CHAT, CHAT.parse({"model": "a", "messages": MESSAGES[:2], "stream": True}), "call_1")
    relay.feed(stream)
    assert relay.complete
    return relay.assembled()


def test_a_stream_of_events_assembles_into_the_same_answer_as_the_whole_message() -> None:
    streamed = assembled(MessageStream().feed(events()))
    whole = Anthropic().answer(PATH, dict(MESSAGE))
    assert streamed["usage"] == whole["usage"]
    [left], [right] = streamed["choices"], whole["choices"]
    assert left["finish_reason"] == right["finish_reason"]
    for key in ("content", "reasoning_content", "thinking_blocks", "tool_calls"):
        assert left["message"][key] == right["message"][key]


@given(st.integers(0, len(events())))
def test_where_the_bytes_of_a_stream_are_cut_changes_nothing(cut: int) -> None:
    stream = MessageStream()
    assert stream.feed(events()[:cut]) + stream.feed(events()[cut:]) == MessageStream().feed(events())


def test_thinking_that_was_signed_comes_back_through_chat_as_it_was() -> None:
    said = Anthropic().answer(PATH, dict(MESSAGE))["choices"][0]["message"]
    asked = {"model": "a", "messages": [*MESSAGES[:2], said, {"role": "tool", "tool_call_id": "t1", "content": "1"}]}
    sent = Anthropic().body(PATH, asked, None)["messages"]
    content: Any = MESSAGE["content"]
    assert sent[-2]["content"] == content, "thinking first, its signature and what is redacted unchanged"
    unsigned = {**said, "thinking_blocks": None}
    sent = Anthropic().body(PATH, {**asked, "messages": [*MESSAGES[:2], unsigned]}, None)["messages"]
    assert [block["type"] for block in sent[-1]["content"]] == ["text", "tool_use", "tool_use"]


def test_thinking_between_what_was_said_keeps_its_place_both_ways() -> None:
    thinking = {"type": "thinking", "thinking": "Hmm.", "signature": "s"}
    content: list[dict[str, Any]] = [
        thinking, {"type": "text", "text": "a"}, {**thinking, "signature": "t"},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {}},
    ]  # fmt: skip
    messages = BY_NAME["anthropic"]
    question = {"role": "user", "content": "x"}
    asked = {"model": "a", "max_tokens": 9, "messages": [question]}
    answer = Anthropic().answer(PATH, {**MESSAGE, "content": content})
    public = messages.public(answer, messages.parse(asked), "call_1")
    assert public["content"] == content
    ours = {"type": "thinking", "thinking": "mine", "signature": "reasoning"}
    history = [question, {"role": "assistant", "content": [ours, *content]}, question]
    request = messages.parse({**asked, "messages": history})
    sent = Anthropic().body(PATH, messages.engine_body(request, {"max_tokens": 9}, "a"), request)
    assert sent["messages"][1]["content"] == content


def test_an_error_event_and_broken_json_are_errors_of_the_stream() -> None:
    for raw in (b'data: {"type":"error","error":{"type":"overloaded_error","message":"busy"}}\n\n', b"data: {no\n\n"):
        relay = Relay(CHAT, CHAT.parse({"model": "a", "messages": MESSAGES[:2], "stream": True}), "call_1")
        relay.feed(MessageStream().feed(raw))
        assert relay.error is not None and not relay.complete


def test_openai_gets_neither_flags_of_engines_nor_defaults() -> None:
    body, request = engine_body({"messages": MESSAGES[:2]})
    sent = OpenAI("max_completion_tokens").body(PATH, body, request)
    assert sent == {"model": "model-id", "messages": MESSAGES[:2], "max_completion_tokens": 64}
    body, request = engine_body({"messages": MESSAGES[:2], "logprobs": True, "temperature": 0.3, "stream": True})
    sent = OpenAI().body(PATH, body, request)
    assert (sent["logprobs"], sent["temperature"], sent["max_tokens"]) == (True, 0.3, 64)
    assert sent["stream_options"] == {"include_usage": True}


def test_sglang_is_asked_in_its_own_words_and_its_ids_are_found_where_it_puts_them() -> None:
    body, request = engine_body({"messages": MESSAGES[:2], "stream": True})
    sent = SGLang().body(PATH, body, request)
    assert sent["return_prompt_token_ids"] and sent["return_meta_info"] and sent["logprobs"]
    assert "return_token_ids" not in sent and "stream" not in sent
    choice = {
        "index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop",
        "prompt_token_ids": [1, 2, 3], "logprobs": None,
        "meta_info": {"output_token_logprobs": [[-0.5, 7, "o"], [-0.25, 8, None]]},
    }  # fmt: skip
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    answer = SGLang().answer(PATH, {"id": "x", "choices": [choice], "usage": usage})
    capture = CHAT.capture(answer)
    assert capture.prompt_ids == [1, 2, 3]
    assert (capture.choices[0].completion_ids, capture.choices[0].logprobs) == ([7, 8], [-0.5, -0.25])
    stream = b"".join(b"data: " + orjson.dumps(c) + b"\n\n" for c in chunks_of(answer, PATH)) + b"data: [DONE]\n\n"
    again = CHAT.capture(assembled(stream))
    assert (again.prompt_ids, again.choices[0].completion_ids) == ([1, 2, 3], [7, 8])
    assert again.choices[0].logprobs == [-0.5, -0.25] and again.usage == usage


def test_what_sglang_does_not_return_stays_missing() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
    metas: tuple[dict[str, Any], ...] = ({}, {"meta_info": {}}, {"meta_info": {"output_token_logprobs": [[1]]}})
    for meta in metas:
        capture = CHAT.capture(SGLang().answer(PATH, {"choices": [{**choice, **meta}]}))
        assert capture.prompt_ids is None and capture.choices[0].completion_ids is None


PRICED = PriceConfig(input=3.0, output=15.0, cached=0.3, cache_write=3.75)


def test_a_price_counts_cached_tokens_once() -> None:
    usage = Anthropic().answer(PATH, dict(MESSAGE))["usage"]
    assert cost_usd(PRICED, usage) == pytest.approx((10 * 3.0 + 100 * 0.3 + 20 * 3.75 + 7 * 15.0) / 1e6)
    assert cost_usd(PRICED, {}) == 0.0
    assert cost_usd(PRICED, {"prompt_tokens": "many", "completion_tokens": True}) == 0.0


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7))
def test_cached_tokens_never_cost_more_than_fresh_ones(prompt: int, cached: int, completion: int) -> None:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    with_cache = cost_usd(PRICED, {**counts, "prompt_tokens_details": {"cached_tokens": min(cached, prompt)}})
    assert 0 <= with_cache <= cost_usd(PRICED, counts) + 1e-12


@pytest.mark.parametrize(
    ("status", "kind", "told"),
    [
        (401, "provider_authentication", 502), (403, "provider_authentication", 502),
        (429, "provider_rate_limited", 429), (503, "provider_overloaded", 503), (529, "provider_overloaded", 503),
        (404, "provider_refused", 404), (500, "provider_failed", 502),
    ],
)  # fmt: skip
def test_a_fault_of_a_provider_has_a_name(status: int, kind: str, told: int) -> None:
    fault = fault_of(
        Provider(name="p", timeout_s=10.0, price=PRICED), status, b'{"error": {"message": "because"}}', 7.0
    )
    assert isinstance(fault, ProviderError)
    assert (fault.kind, fault.http_status, fault.status) == (kind, told, status)
    assert "'p'" in str(fault) and "because" in str(fault)
    assert (fault.retry_after_s == 7.0) == (status in (429, 503, 529))


def test_retry_after_is_read_as_seconds_or_as_a_date() -> None:
    assert retry_after_of("3") == 3.0 and retry_after_of(None) is None and retry_after_of("soon") is None
    assert retry_after_of("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


def tree(**policy: Any) -> dict[str, Any]:
    return {
        "providers": {"p": {"kind": "openai", "key_env": "LEYDEN_TEST_PROVIDER_KEY"}},
        "policies": {"judge": {"provider": "p", "model": "m", **policy}},
    }


def test_a_policy_of_a_provider_is_never_trainable(tmp_path: Any) -> None:
    assert not from_tree(tree(), base_dir=tmp_path).policies["judge"].trainable
    with pytest.raises(ConfigError, match=r"policies\.judge has a provider and trainable = true"):
        from_tree(tree(trainable=True), base_dir=tmp_path)


@pytest.mark.parametrize(
    ("policy", "said"),
    [({"provider": "q"}, "is not there"), ({"engine": "http://x"}, "keep one"), ({"model": ""}, "model is empty")],
)
def test_a_policy_of_a_provider_must_fit_it(policy: dict[str, Any], said: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=said):
        from_tree(tree(**policy), base_dir=tmp_path)


def test_a_key_that_is_not_set_is_an_error_at_the_start(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'leyden.db'}")
    try:
        monkeypatch.delenv("LEYDEN_TEST_PROVIDER_KEY", raising=False)
        with pytest.raises(ConfigError, match="LEYDEN_TEST_PROVIDER_KEY"):
            Router(from_tree(tree(), base_dir=tmp_path), store)
        monkeypatch.setenv("LEYDEN_TEST_PROVIDER_KEY", "secret")
        assert "secret" not in repr(vars(Router(from_tree(tree(), base_dir=tmp_path), store)))
    finally:
        store.close()
