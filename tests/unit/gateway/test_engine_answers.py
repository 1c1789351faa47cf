"""Reading an engine's answer for its numbers gives what reading all of it gives."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.gateway.dialects import BY_NAME
from leyden.gateway.dialects.chat_engine import VALUES
from leyden.gateway.engine_answers import fault_of, read_chat
from leyden.gateway.stream import read_json
from leyden.traces.tokens import checked

CHAT = BY_NAME["openai_chat"]
REQUEST = CHAT.parse({"model": "main", "messages": [{"role": "user", "content": "hi"}], "return_token_ids": True})
WITH_LOGPROBS = CHAT.parse({"model": "main", "messages": [{"role": "user", "content": "hi"}], "logprobs": True})

logprob = st.floats(-50, 0) | st.integers(-5, 0) | st.sampled_from([None, "x", True, 5.0])
entry: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"logprob": logprob, "token": st.just("a"), "bytes": st.just([97])}
) | st.just({})
ids = st.lists(st.integers(0, 2**31 - 1) | st.sampled_from([-1, True, 1.0, 2**40, None]), max_size=6) | st.none()
good_ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)
choice = st.fixed_dictionaries(
    {"index": st.integers(0, 3), "message": st.just({"role": "assistant", "content": "hi \u00e9"})},
    optional={
        "finish_reason": st.sampled_from(["stop", "length", None]),
        "stop_reason": st.sampled_from([None, 7, "end"]),
        "token_ids": ids | good_ids,
        "logprobs": st.none()
        | st.just({})
        | st.fixed_dictionaries({"content": st.none() | st.lists(entry, max_size=6)}),
        "routed_experts": st.just([1]),
    },
)
answer = st.fixed_dictionaries(
    {"choices": st.lists(choice, max_size=3)},
    optional={
        "id": st.just("x"), "created": st.just(3), "object": st.just("chat.completion"), "usage": st.just({"n": 1}),
        "prompt_token_ids": ids | good_ids, "leyden_prompt": st.just("spliced"), "prompt_logprobs": st.none(),
    },
)  # fmt: skip


def _said(answer: Any) -> Any:
    """Everything that is made of an answer."""
    fault = fault_of(answer)
    if fault is not None:
        return fault
    capture = CHAT.capture(answer)
    tokens = checked(capture.prompt_ids, capture.choices, capture.usage)
    numbers = [
        (one.index, one.completion_ids.tolist(), repr(one.logprobs.tolist()), one.finish_reason, one.text)
        for one in tokens.choices
    ]
    public = CHAT.public(answer, REQUEST, "call")
    return tokens.prompt_ids.tolist(), numbers, tokens.provenance, tokens.refusal, capture.is_spliced, public


@settings(deadline=None)
@given(answer)
def test_the_numbers_alone_say_what_the_whole_answer_says(answer: dict[str, Any]) -> None:
    raw = orjson.dumps(answer)
    assert _said(read_chat(raw, REQUEST)) == _said(read_json(raw))


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"{}", b"null", b'{"choices": null}', b'{"choices": [1]}', b'{"choices": [{"index": "a"}]}',
        b'{"choices": [{"message": 3}]}', b'{"error": {"message": "no"}}', b"\xff\xfe",
        b'{"choices": [{"index": 0, "logprobs": {"content": [{"logprob": NaN}]}, "token_ids": [3]}]}',
        b'{"choices": [{"index": 0, "logprobs": [1]}]}', b'{"choices": [{"index": 0.5}]}',
        b'{"choices": [{"message": {"content": "\\ud800"}}]}',
    ],
)  # fmt: skip
def test_what_is_no_usual_answer_is_read_whole(raw: bytes) -> None:
    assert _said(read_chat(raw, REQUEST)) == _said(read_json(raw))


def test_a_harness_that_wants_log_probabilities_gets_them_as_the_engine_wrote_them() -> None:
    content = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]
    raw = json.dumps({"choices": [{"index": 0, "message": {}, "logprobs": {"content": content}}]}).encode()
    whole = read_chat(raw, WITH_LOGPROBS)
    assert CHAT.public(whole, WITH_LOGPROBS, "call")["choices"][0]["logprobs"] == {"content": content}  # type: ignore[arg-type]
    assert VALUES not in str(CHAT.public(read_chat(raw, REQUEST), REQUEST, "call"))  # type: ignore[arg-type]
