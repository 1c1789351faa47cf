"""Facts of the translation between APIs: what a harness sends back is what the engine said, in any cut and order."""

import json
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leyden.base.errors import EngineError
from leyden.gateway.dialects import BY_NAME
from leyden.gateway.dialects.anthropic_blocks import Conversation as Blocks
from leyden.gateway.dialects.anthropic_blocks import blocks_of, exact_texts, plain, with_exact
from leyden.gateway.dialects.responses_items import Conversation as Items
from leyden.gateway.dialects.responses_items import turn_of

UNHURRIED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXT, VALUES, max_size=3)
WRITERS = st.sampled_from(
    [
        json.dumps,
        lambda value: json.dumps(value, ensure_ascii=False),
        lambda value: json.dumps(value, separators=(",", ":")),
        lambda value: json.dumps(value, indent=1),
    ]
)
WRITTEN = st.tuples(ARGUMENTS, WRITERS).map(lambda pair: pair[1](pair[0]))
RAW = WRITTEN | st.just("") | st.just('{"cut": ') | st.just("[1]")


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    """What an engine says: text, calls, reasoning, or any of them."""
    calls = draw(st.lists(st.tuples(st.sampled_from(["f", "g"]), RAW), max_size=3))
    content = draw(st.none() | st.text(min_size=1, max_size=8)) if calls else draw(TEXT)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": text}}
            for index, (name, text) in enumerate(calls)
        ]
    name = draw(st.none() | st.sampled_from(["reasoning", "reasoning_content"]))
    if name is not None:
        message[name] = draw(st.text(min_size=1, max_size=8))
    return message


def answer_of(message: dict[str, Any]) -> dict[str, Any]:
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {"created": 1, "choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": {}}


@UNHURRIED
@given(messages())
def test_items_of_a_response_are_the_message_they_were_made_of(message: dict[str, Any]) -> None:
    dialect = BY_NAME["openai_responses"]
    request = dialect.parse({"model": "main", "input": "hi"})
    public = orjson.loads(orjson.dumps(dialect.public(answer_of(message), request, "call_1")))
    assert turn_of(public["output"]) == message


@UNHURRIED
@given(messages())
def test_blocks_of_a_message_are_the_message_they_were_made_of(message: dict[str, Any]) -> None:
    blocks = json.loads(json.dumps(blocks_of(message)))
    conversation = Blocks()
    conversation.add({"role": "assistant", "content": blocks}, "messages[0]")
    assert with_exact(conversation.messages, exact_texts(message)) == [message]


@UNHURRIED
@given(st.lists(WRITTEN, min_size=1, max_size=4))
def test_an_id_that_an_engine_uses_again_does_not_mix_up_arguments(texts: list[str]) -> None:
    known: dict[str, list[tuple[Any, str]]] = {"c": []}
    for text in texts:
        call = {"id": "c", "function": {"name": "f", "arguments": text}}
        known["c"] += list(exact_texts({"tool_calls": [call]}).get("c", ()))
    for text in texts:
        value = json.loads(text)
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": plain(value)}}
        [made] = with_exact([{"role": "assistant", "content": None, "tool_calls": [call]}], known)
        assert json.loads(made["tool_calls"][0]["function"]["arguments"]) == value


@UNHURRIED
@given(messages(), st.data())
def test_the_order_of_the_items_of_a_turn_makes_no_difference(message: dict[str, Any], data: st.DataObject) -> None:
    dialect = BY_NAME["openai_responses"]
    request = dialect.parse({"model": "main", "input": "hi"})
    output = dialect.public(answer_of(message), request, "call_1")["output"]
    said = [item for item in output if item["type"] == "message"]
    others = [item for item in output if item["type"] != "message"]
    place = data.draw(st.integers(0, len(others)))
    if any(item["type"] == "reasoning" for item in others):
        place = max(place, 1)  # a turn begins with its reasoning
    items = Items()
    items.add([*others[:place], *said, *others[place:]])
    assert items.messages == ([message] if output else [])


@UNHURRIED
@given(messages(), st.lists(st.integers(0, 40), max_size=6))
def test_a_stream_cut_anywhere_says_what_the_whole_answer_says(message: dict[str, Any], cuts: list[int]) -> None:
    deltas = list(cut_up(message, cuts))
    for name, body in (
        ("openai_responses", {"model": "main", "input": "hi", "stream": True}),
        (
            "anthropic",
            {"model": "main", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "stream": True},
        ),
    ):
        dialect = BY_NAME[name]
        request = dialect.parse(body)
        translator, assembly = dialect.translator(request, "call_1"), dialect.assembly(request)
        out = b""
        for chunk in [
            *({"created": 1, "choices": [{"index": 0, "delta": delta}]} for delta in deltas),
            {"created": 1, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        ]:
            assembly.add(chunk)
            out += translator.events(chunk)
        public = dialect.public(assembly.body(), request, "call_1")
        out += translator.closing(public)
        assert heard(out) == {key: text for key, text in spoken(message).items() if text or key in ("f", "g")}, (
            "texts and arguments"
        )


def cut_up(message: dict[str, Any], cuts: list[int]) -> Any:
    """The message as deltas, each text cut at some of `cuts`."""
    for key in ("reasoning", "reasoning_content", "content"):
        for piece in pieces(message.get(key) or "", cuts):
            yield {key: piece}
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield {"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": ""}}]}
        for piece in pieces(call["function"]["arguments"], cuts):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


def spoken(message: dict[str, Any]) -> dict[str, str]:
    said = {"text": message["content"] or "", "thought": message.get("reasoning") or ""}
    said["thought"] += message.get("reasoning_content") or ""
    said["arguments"] = "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ())
    return said


def heard(stream: bytes) -> dict[str, str]:
    """The texts of a stream of named events."""
    kinds = {
        "response.output_text.delta": "text",
        "response.reasoning_text.delta": "thought",
        "response.function_call_arguments.delta": "arguments",
        "text_delta": "text",
        "thinking_delta": "thought",
        "input_json_delta": "arguments",
    }
    said: dict[str, str] = {}
    for line in stream.split(b"\n"):
        if not line.startswith(b"data: "):
            continue
        event = orjson.loads(line[6:])
        delta = event.get("delta")
        kind = kinds.get(event["type"] if isinstance(delta, str) else (delta or {}).get("type", ""))
        if kind is not None:
            text = delta if isinstance(delta, str) else next(v for k, v in delta.items() if k != "type")
            if text:
                said[kind] = said.get(kind, "") + text
    return said


@pytest.mark.parametrize("name", ["openai_responses", "anthropic"])
def test_text_after_a_call_goes_on_and_a_call_that_is_taken_up_again_is_a_fault(name: str) -> None:
    dialect = BY_NAME[name]
    body: dict[str, Any] = {
        "model": "main",
        "stream": True,
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "x"}],
    }
    if name == "openai_responses":
        body = {"model": "main", "stream": True, "input": "x"}
    translator = dialect.translator(dialect.parse(body), "call_1")

    def feed(**delta: Any) -> bytes:
        return translator.events({"choices": [{"index": 0, "delta": delta}]})

    def call(index: int) -> list[dict[str, Any]]:
        return [{"index": index, "id": f"c{index}", "function": {"name": "f", "arguments": "{}"}}]

    told = feed(content="a") + feed(tool_calls=call(0)) + feed(content="b") + feed(tool_calls=call(1))
    assert heard(told) == {"text": "ab", "arguments": "{}{}"}
    with pytest.raises(EngineError, match="tool call 0"):
        feed(tool_calls=call(0))
