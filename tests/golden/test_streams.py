"""Recorded streams: what a harness gets and what is assembled never depends on where the bytes were cut."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.golden.record import CALL_ID, CASES, FOLDER, relayed

from leyden.gateway.dialects import BY_NAME, DIALECTS
from leyden.gateway.stream import Relay

ENDS = {
    "openai_chat": [b'"finish_reason":"', b"[DONE]"],
    "openai_completions": [b'"finish_reason":"', b"[DONE]"],
    "openai_responses": [b"response.completed", b"response.incomplete"],
    "anthropic": [b"message_delta", b"message_stop"],
}
"""What tells a client that its answer is whole."""
LONG = {"openai_responses/tools", "anthropic/tools"}
"""Not cut at every byte, which takes time with the square of the length: the cases `call` have the same events."""


def recorded(name: str) -> tuple[str, dict[str, Any], bytes, bytes, dict[str, Any]]:
    """(dialect, request, the engine's bytes, the harness's bytes, the assembled answer)."""
    told = orjson.loads((FOLDER / f"{name}.json").read_bytes())
    files = [(FOLDER / f"{name}.{end}").read_bytes() for end in ("engine", "client")]
    return Path(name).parts[0], told["request"], files[0], files[1], told["assembled"]


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_stream_is_relayed_and_assembled_as_recorded(name: str) -> None:
    dialect, request, data, public, assembled = recorded(name)
    assert relayed(dialect, request, [data]) == (public, assembled)


@pytest.mark.parametrize("name", sorted(CASES.keys() - LONG))
def test_a_cut_at_any_byte_changes_nothing(name: str) -> None:
    dialect, request, data, public, assembled = recorded(name)
    for cut in range(len(data) + 1):
        assert relayed(dialect, request, [data[:cut], data[cut:]]) == (public, assembled), cut


@pytest.mark.parametrize("name", CASES)
def test_a_stream_that_comes_byte_by_byte_changes_nothing(name: str) -> None:
    dialect, request, data, public, assembled = recorded(name)
    assert relayed(dialect, request, [data[k : k + 1] for k in range(len(data))]) == (public, assembled)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=12))
def test_any_cuts_change_nothing(cuts: list[int]) -> None:
    dialect, request, data, public, assembled = recorded("openai_completions/text")
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [data[a:b] for a, b in pairwise(edges)]
    assert relayed(dialect, request, parts) == (public, assembled)


@pytest.mark.parametrize("name", CASES)
def test_the_end_of_a_stream_is_held_back_until_it_is_asked_for(name: str) -> None:
    dialect, request, data, public, _ = recorded(name)
    member = BY_NAME[dialect]
    parsed = member.parse(request)
    relay = Relay(member, parsed, CALL_ID)
    early = relay.feed(data)
    late = relay.terminal(member.public(relay.assembled(), parsed, CALL_ID))
    assert public.startswith(early) and public == early + late
    told = sum(early.count(sign) for sign in ENDS[dialect])
    assert told == request.get("n", 1) - 1, "the event that ends the last choice is not among the early ones"
    assert any(sign in late for sign in ENDS[dialect])


@pytest.mark.parametrize("name", CASES)
def test_a_stored_answer_is_replayed_as_a_stream_that_says_the_same(name: str) -> None:
    dialect, request, _, public, assembled = recorded(name)
    member = BY_NAME[dialect]
    parsed = member.parse(request)
    again = member.replay(member.public(assembled, parsed, CALL_ID), parsed)
    assert said(dialect, again) == said(dialect, public)


def said(dialect: str, stream: bytes) -> Any:
    """What a client has read when a stream is over: by place, its texts put together; and how it ended."""
    texts: dict[Any, str] = {}
    ends: list[Any] = []
    for line in stream.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = orjson.loads(line[6:])
        for choice in event.get("choices", ()):
            delta = choice.get("delta", choice)
            pieces = {"text": delta.get("content") or delta.get("text") or ""}
            for call in delta.get("tool_calls", ()):
                pieces[f"call {call['index']}"] = call["function"]["arguments"]
            for what, text in pieces.items():
                texts[choice["index"], what] = texts.get((choice["index"], what), "") + text
            if choice["finish_reason"]:
                ends.append((choice["index"], choice["finish_reason"]))
        kind = event.get("type", "")
        if kind.endswith("delta") and kind != "message_delta":
            delta = event["delta"]
            place = event.get("output_index", event.get("index"))
            text = delta if isinstance(delta, str) else next(v for k, v in delta.items() if k != "type")
            what = "" if isinstance(delta, str) else delta["type"]
            texts[place, what] = texts.get((place, what), "") + text
        if kind in ("response.completed", "message_delta"):
            ends.append({k: v for k, v in event.items() if k != "sequence_number"})
        if kind in ("response.output_item.done", "content_block_start"):
            ends.append(event.get("item", event.get("content_block")))
    return texts, sorted(map(str, ends))


@pytest.mark.parametrize("name", CASES)
def test_the_assembled_answer_has_the_tokens_of_the_engine(name: str) -> None:
    dialect, _, data, _, assembled = recorded(name)
    sent: dict[int, list[int]] = {}
    for line in data.replace(b"\r", b"").split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in orjson.loads(line[6:])["choices"]:
                sent.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    capture = BY_NAME[dialect].capture(assembled)
    assert {choice.index: choice.completion_ids for choice in capture.choices} == sent
    assert capture.usage["completion_tokens"] == sum(map(len, sent.values()))


def test_every_dialect_has_a_recorded_stream() -> None:
    assert {Path(name).parts[0] for name in CASES} == {dialect.name for dialect in DIALECTS}
