"""Answers of the fake engine in other formats than vLLM's: SGLang's server, OpenAI's and Anthropic's own APIs.

Each follows what that server documents, its gaps included: SGLang returns token truth of whole chat answers only and
refuses to stream it; OpenAI refuses fields that it does not know; Anthropic has messages and events of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Literal

import orjson

from leyden.testing.scripted import Behaviour, Reply, completion_ids, text_ids

Format = Literal["vllm", "sglang", "openai"]
"""By `Behaviour.format`; requests to `messages` are answered as Anthropic does, whatever it says."""
_OPENAI_FIELDS = frozenset(
    {
        "model", "messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "max_tokens", "logprobs",
        "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed", "stream", "stream_options",
        "top_logprobs", "response_format",
    }
)  # fmt: skip


def refusal(behaviour: Behaviour, body: Mapping[str, Any]) -> str | None:
    """Why a server of this format refuses the body, None if it does not."""
    if behaviour.format == "vllm" and body.get("continue_final_message") and body.get("add_generation_prompt", True):
        return "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
    if behaviour.format == "sglang" and body.get("stream"):
        for flag in ("return_prompt_token_ids", "return_meta_info"):
            if body.get(flag):
                return f"{flag} is not supported with streaming on /v1/chat/completions"
    if behaviour.format == "openai":
        unknown = sorted(body.keys() - _OPENAI_FIELDS)
        if unknown:
            return f"Unrecognized request argument supplied: {unknown[0]}"
    return None


def asked(behaviour: Behaviour, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body as vLLM would have been asked for what this format was."""
    made = dict(body)
    if behaviour.format != "vllm":
        made["return_token_ids"] = bool(body.get("return_prompt_token_ids"))
    if "max_completion_tokens" in made:
        made["max_tokens"] = made.pop("max_completion_tokens")
    return made


def whole(behaviour: Behaviour, body: Mapping[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """vLLM's whole answer in this format."""
    if behaviour.format == "vllm":
        return answer
    made = {key: value for key, value in answer.items() if key not in ("prompt_token_ids", "kv_transfer_params")}
    made["choices"] = [
        _sglang_choice(body, choice, answer) if behaviour.format == "sglang" else choice for choice in answer["choices"]
    ]
    return made


def _sglang_choice(body: Mapping[str, Any], choice: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    made = {key: value for key, value in choice.items() if key not in ("token_ids", "stop_reason")}
    made["matched_stop"] = None
    ids, content = choice.get("token_ids"), (choice.get("logprobs") or {}).get("content")
    if body.get("return_prompt_token_ids") and "prompt_token_ids" in answer:
        made["prompt_token_ids"] = answer["prompt_token_ids"]
    if body.get("return_meta_info"):
        meta: dict[str, Any] = {"finish_reason": {"type": choice["finish_reason"]}}
        if ids is not None and content is not None:
            meta["output_token_logprobs"] = [
                [entry["logprob"], token, None] for token, entry in zip(ids, content, strict=True)
            ]
        made["meta_info"] = meta
    return made


def signed(thinking: str) -> dict[str, Any]:
    """A block of thinking, with a signature that fits nothing else."""
    signature = blake2b(thinking.encode(), digest_size=12).hexdigest()
    return {"type": "thinking", "thinking": thinking, "signature": signature}


def forged(body: Mapping[str, Any]) -> str | None:
    """Why Anthropic's API refuses the body: thinking that it has not signed. None if it does not."""
    for place, message in enumerate(body["messages"]):
        for index, block in enumerate(message["content"] if isinstance(message["content"], list) else ()):
            if block.get("type") == "thinking" and block != signed(block.get("thinking", "")):
                return f"messages.{place}.content.{index}: Invalid `signature` in `thinking` block"
    return None


def message(body: Mapping[str, Any], reply: Reply, serial: int) -> dict[str, Any]:
    """A whole answer of Anthropic's Messages API. It thinks where it is asked to, and then also redacts."""
    if (body.get("thinking") or {}).get("type") not in ("enabled", "adaptive"):
        reply = replace(reply, reasoning="")
    ids, reason = completion_ids(reply, body.get("max_tokens"))
    content: list[dict[str, Any]] = []
    if reply.reasoning:
        content += [signed(reply.reasoning), {"type": "redacted_thinking", "data": f"sealed {serial}"}]
    if reply.text:
        content.append({"type": "text", "text": reply.text.encode()[: len(ids)].decode(errors="ignore")})
    for number, (name, arguments) in enumerate(reply.tool_calls):
        content.append({"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": orjson.loads(arguments)})
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    return {
        "id": f"msg_{serial}", "type": "message", "role": "assistant", "model": body.get("model", ""),
        "content": content, "stop_reason": reasons.get(reason, "end_turn"), "stop_sequence": None,
        "usage": {
            "input_tokens": len(text_ids(orjson.dumps(body["messages"]).decode())), "output_tokens": len(ids),
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
        },
    }  # fmt: skip


def message_events(answer: Mapping[str, Any]) -> Sequence[bytes]:
    """The same as the events of a stream."""
    usage = answer["usage"]
    start = {**answer, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    parts: list[dict[str, Any]] = [{"type": "message_start", "message": start}, {"type": "ping"}]
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            opened: dict[str, Any] = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": character} for character in block["text"]]
        elif block["type"] == "thinking":
            opened = {"type": "thinking", "thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": character} for character in block["thinking"]]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        elif block["type"] == "redacted_thinking":
            opened, deltas = dict(block), []
        else:
            opened = {**block, "input": {}}
            text = orjson.dumps(block["input"]).decode()
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in (text[:3], text[3:])]
        parts.append({"type": "content_block_start", "index": index, "content_block": opened})
        parts += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        parts.append({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    parts.append({"type": "message_delta", "delta": ended, "usage": {"output_tokens": usage["output_tokens"]}})
    parts.append({"type": "message_stop"})
    return [f"event: {part['type']}\n".encode() + b"data: " + orjson.dumps(part) + b"\n\n" for part in parts]
