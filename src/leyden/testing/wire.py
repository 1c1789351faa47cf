"""Answers of a fake engine in the wire format of vLLM's server: pure functions from a request body to bodies.

Chat and Completions, whole and in chunks, with `return_token_ids`, `logprobs`, `n`, tools and usage.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from leyden.testing.scripted import Faults, Reply, completion_ids, logprob, prompt_ids

Body = dict[str, Any]


class Answer:
    """One answer: `whole()` for an unstreamed request, `chunks()` for a stream."""

    def __init__(self, body: Mapping[str, Any], replies: Sequence[Reply], faults: Faults, serial: int) -> None:
        self._body = body
        self._faults = faults
        self._chat = "messages" in body
        self._prompt = prompt_ids(body)
        limit = body.get("max_tokens")
        self._spoken = [(reply, *completion_ids(reply, limit)) for reply in replies]
        self._head: Body = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{serial}",
            "created": 1_700_000_000,
            "model": body.get("model", ""),
        }

    def whole(self) -> Body:
        """The body of an unstreamed answer."""
        choices = []
        for index, (reply, ids, reason) in enumerate(self._spoken):
            text, calls = _cut(reply, len(ids)), _calls(reply)
            choice: Body = {"index": index, "finish_reason": reason, "stop_reason": reply.stop_reason}
            if self._chat:
                thought = {reply.reasoning_field: reply.reasoning} if reply.reasoning else {}
                choice["message"] = {
                    "role": "assistant", "content": None if calls and not text else text, "refusal": None,
                    "tool_calls": calls, **thought,
                }  # fmt: skip
            else:
                choice["text"] = text
            self._tokens(choice, ids, 0)
            choices.append(choice)
        answer: Body = {
            **self._head,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": choices,
            "usage": self._usage(),
            "prompt_logprobs": None,
            "kv_transfer_params": None,
        }
        if self._chat and self._wants_ids("prompt_token_ids"):
            answer["prompt_token_ids"] = self._prompt
        return answer

    def chunks(self) -> list[Body]:
        """The chunks of a stream: a role, one chunk per token, the finish reason with the last, and usage."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        head = {**self._head, "object": kind}
        chunks: list[Body] = []
        for index, (reply, ids, reason) in enumerate(self._spoken):
            if self._chat:
                first: Body = {
                    "index": index,
                    "delta": {"role": "assistant", "content": ""},
                    "finish_reason": None,
                }
                ids_part = {"prompt_token_ids": self._prompt} if self._wants_ids("prompt_token_ids") else {}
                chunks.append({**head, **ids_part, "choices": [{**first, "logprobs": None}]})
            for position, piece in enumerate(self._pieces(reply, ids)):
                choice: Body = {"index": index, "finish_reason": None, "stop_reason": None}
                choice |= {"delta": piece} if self._chat else {"text": piece.get("content") or ""}
                if position == len(ids) - 1:
                    choice |= {"finish_reason": reason, "stop_reason": reply.stop_reason}
                self._tokens(choice, ids[position : position + 1], position, first=position == 0)
                chunks.append({**head, "choices": [choice]})
        if (self._body.get("stream_options") or {}).get("include_usage"):
            chunks.append({**head, "choices": [], "usage": self._usage()})
        return chunks

    def _pieces(self, reply: Reply, ids: list[int]) -> list[Body]:
        """What each token adds, as far as its bytes make whole characters: reasoning, text, then each call, its
        name first and its arguments character by character."""
        pieces: list[Body] = [{} for _ in ids]
        if reply.num_tokens is not None:
            return [{"content": "x"} for _ in ids]
        said: list[tuple[str, Body]] = []
        if reply.reasoning:
            said += [("(", {}), *((c, {reply.reasoning_field: c}) for c in reply.reasoning), (")", {})]
        said += [(character, {"content": character}) for character in reply.text]
        for index, call in enumerate(_calls(reply)):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            begun = {**call, "index": index, "function": {"name": name, "arguments": ""}}
            said.append((f"<{name}>", {"tool_calls": [begun]}))
            said += [(c, {"tool_calls": [{"index": index, "function": {"arguments": c}}]}) for c in arguments]
        position = 0
        for text, delta in said:
            position += len(text.encode())
            if position <= len(ids):
                pieces[position - 1] = delta
        return pieces

    def _tokens(self, choice: Body, ids: list[int], offset: int, first: bool = True) -> None:
        """Add ids and log-probabilities of the tokens at `offset` to a choice, as far as asked for."""
        if self._wants_ids("token_ids"):
            choice["token_ids"] = ids
        if not self._chat and first and self._wants_ids("prompt_token_ids"):
            choice["prompt_token_ids"] = self._prompt
        wanted = self._body.get("logprobs")
        if wanted is None or wanted is False or "logprobs" in self._faults.missing:
            choice["logprobs"] = None
            return
        values = [logprob(offset + k) for k in range(len(ids))]
        if self._faults.nan_logprob and offset == 0 and values:
            values[0] = math.nan
        ids = ids[: len(ids) - self._faults.missing_logprobs_of]
        values = values[: len(ids)]
        if self._chat:
            choice["logprobs"] = {
                "content": [
                    {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
                    for token, value in zip(ids, values, strict=True)
                ]
            }
        else:
            names = [f"token_id:{token}" for token in ids]
            choice["logprobs"] = {
                "tokens": names, "token_logprobs": values,
                "top_logprobs": [{name: value} for name, value in zip(names, values, strict=True)],
                "text_offset": list(range(offset, offset + len(ids))),
            }  # fmt: skip

    def _wants_ids(self, what: str) -> bool:
        return bool(self._body.get("return_token_ids")) and what not in self._faults.missing

    def _usage(self) -> Body:
        sampled = sum(len(ids) for _, ids, _ in self._spoken) + int(self._faults.wrong_usage)
        return {
            "prompt_tokens": len(self._prompt), "completion_tokens": sampled,
            "total_tokens": len(self._prompt) + sampled,
        }  # fmt: skip


def _calls(reply: Reply) -> list[Body]:
    return [
        {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(reply.tool_calls)
    ]


def _cut(reply: Reply, num_ids: int) -> str:
    """The text of the first `num_ids` bytes, whole characters only."""
    if reply.num_tokens is not None:
        return "x" * num_ids
    return reply.text.encode()[:num_ids].decode(errors="ignore")
