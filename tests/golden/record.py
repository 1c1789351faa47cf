"""Writes the recorded streams of this folder again, from the fake engine's wire format: `python -m
tests.golden.record`.

Per case: `NAME.engine` (bytes of the engine), `NAME.client` (bytes that a harness gets), `NAME.json`
(request, and the assembled answer). A change of these files is a change of what harnesses see: look at it
before you commit it.
"""

from pathlib import Path
from typing import Any

import orjson

from leyden.gateway.dialects import BY_NAME
from leyden.gateway.stream import Relay
from leyden.testing.scripted import Faults, Reply
from leyden.testing.wire import Answer

CALL_ID = "call_1"
FOLDER = Path(__file__).parent
MESSAGES = [{"role": "user", "content": "hi"}]
CASES: dict[str, tuple[str, dict[str, Any], list[Reply]]] = {
    "openai_chat/text": (
        "openai_chat",
        {"model": "main", "messages": MESSAGES, "stream": True},
        [Reply(text="h\u00e9, \u4f60")],
    ),
    "openai_chat/tools": (
        "openai_chat",
        {
            "model": "main",
            "messages": MESSAGES,
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": 2,
            "logprobs": True,
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        [Reply(text="a", tool_calls=(("f", '{"x": "y"}'), ("f", "{}"))), Reply(text="b")],
    ),
    "openai_completions/text": (
        "openai_completions",
        {"model": "main", "prompt": "abc", "stream": True, "logprobs": 1},
        [Reply(text="de")],
    ),
    "openai_responses/text": (
        "openai_responses",
        {"model": "main", "input": "hi", "stream": True},
        [Reply(text="h\u00e9, \u4f60")],
    ),
    "openai_responses/tools": (
        "openai_responses",
        {
            "model": "main",
            "instructions": "Be brief.",
            "input": [{"role": "user", "content": "hi"}],
            "stream": True,
            "include": ["message.output_text.logprobs"],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
        },
        [Reply(reasoning="so", text="a", tool_calls=(("f", '{"x": "y"}'), ("f", "{}")))],
    ),
    "anthropic/text": (
        "anthropic",
        {"model": "main", "max_tokens": 64, "messages": MESSAGES, "stream": True},
        [Reply(text="h\u00e9, \u4f60", stop_reason="END")],
    ),
    "anthropic/tools": (
        "anthropic",
        {
            "model": "main",
            "max_tokens": 64,
            "system": "Be brief.",
            "messages": MESSAGES,
            "stream": True,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        },
        [Reply(reasoning="so", text="a", tool_calls=(("f", '{"x": 1.0}'), ("f", "{}")))],
    ),
    "openai_responses/call": (
        "openai_responses",
        {
            "model": "main",
            "input": "hi",
            "stream": True,
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
        },
        [Reply(text="a", tool_calls=(("f", "{}"),))],
    ),
    "anthropic/call": (
        "anthropic",
        {
            "model": "main",
            "max_tokens": 64,
            "messages": MESSAGES,
            "stream": True,
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        },
        [Reply(text="a", tool_calls=(("f", "{}"),))],
    ),
    "anthropic/thinking": (
        "anthropic",
        {
            "model": "main",
            "max_tokens": 64,
            "messages": MESSAGES,
            "stream": True,
            "thinking": {"type": "enabled", "budget_tokens": 32},
        },
        [Reply(reasoning="h\u4f60", text="a")],
    ),
    "anthropic/begun": (
        "anthropic",
        {
            "model": "main",
            "max_tokens": 64,
            "messages": [*MESSAGES, {"role": "assistant", "content": "It is"}],
            "stream": True,
        },
        [Reply(text=" a")],
    ),
}
"""Name, dialect, request, and what the engine says."""


def engine_bytes(dialect: str, request: dict[str, Any], replies: list[Reply]) -> bytes:
    """The stream as an engine sends it, with a keep-alive comment and both kinds of line ends."""
    member = BY_NAME[dialect]
    body = member.engine_body(member.parse(request), {"n": len(replies)}, "main@0")
    events = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in Answer(body, replies, Faults(), 1).chunks()]
    events.insert(1, b": keep-alive\n\n")
    events[2] = events[2].replace(b"\n\n", b"\r\n\r\n")
    return b"".join(events) + b"data: [DONE]\n\n"


def relayed(dialect: str, request: dict[str, Any], parts: list[bytes]) -> tuple[bytes, dict[str, Any]]:
    """(bytes for the harness, assembled answer) of a stream that comes in `parts`."""
    member = BY_NAME[dialect]
    parsed = member.parse(request)
    relay = Relay(member, parsed, CALL_ID)
    public = b"".join(relay.feed(part) for part in parts)
    assert relay.complete
    assembled = relay.assembled()
    return public + relay.terminal(member.public(assembled, parsed, CALL_ID)), assembled


def main() -> None:
    """Write every case."""
    for name, (dialect, request, replies) in CASES.items():
        data = engine_bytes(dialect, request, replies)
        public, assembled = relayed(dialect, request, [data])
        (FOLDER / name).parent.mkdir(exist_ok=True)
        (FOLDER / f"{name}.engine").write_bytes(data)
        (FOLDER / f"{name}.client").write_bytes(public)
        text = orjson.dumps({"request": request, "assembled": assembled}, option=orjson.OPT_INDENT_2)
        (FOLDER / f"{name}.json").write_bytes(text + b"\n")


if __name__ == "__main__":
    main()
