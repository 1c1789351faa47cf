"""SGLang's OpenAI-compatible server.

It has token truth in other places than vLLM: prompt ids in each choice (`return_prompt_token_ids`), sampled ids with
their log-probabilities in the choice's `meta_info.output_token_logprobs` as `[log-probability, id, text]`
(`return_meta_info` with `logprobs`; SGLang 0.5.13 and later). Its streams carry none of these, so a stream is asked
for whole and given to the client in one piece: slower to the first byte, and true.
"""

from typing import Any

from leyden.gateway.dialects.base import Body, ModelRequest
from leyden.gateway.providers.vllm import VLLM


class SGLang(VLLM):
    """See `base.Wire`; addresses and keys are those of vLLM's server."""

    name = "sglang"
    whole_only = True
    flags = "Use SGLang 0.5.13 or later, which honours return_prompt_token_ids, return_meta_info and logprobs"

    def body(self, path: str, body: Body, request: ModelRequest | None) -> Body:
        """The same, with its own names for what must be returned, and never as a stream."""
        # It has no add_generation_prompt: a message that goes on is left out of the template and put behind it.
        sent = {k: v for k, v in body.items() if k not in ("stream", "stream_options", "add_generation_prompt")}
        if path == "chat/completions" and sent.pop("return_token_ids", False):
            sent.update(return_prompt_token_ids=True, return_meta_info=True, logprobs=True)
        return sent

    def answer(self, path: str, answer: Body) -> Body:
        """Ids and log-probabilities where vLLM has them. What is missing stays missing."""
        choices = [_choice(choice) for choice in answer.get("choices") or () if isinstance(choice, dict)]
        made = {**answer, "choices": choices}
        if path == "chat/completions" and choices and choices[0].get("prompt_token_ids") is not None:
            made["prompt_token_ids"] = choices[0]["prompt_token_ids"]
        return made

    def stream(self) -> None:
        """Streams are asked for whole."""


def _choice(choice: Body) -> Body:
    meta = choice.get("meta_info")
    sampled = meta.get("output_token_logprobs") if isinstance(meta, dict) else None
    made = {key: value for key, value in choice.items() if key != "meta_info"}
    if not isinstance(sampled, list) or not all(_is_triple(entry) for entry in sampled):
        return made
    made["token_ids"] = [entry[1] for entry in sampled]
    made["logprobs"] = {
        "content": [
            {"token": str(entry[2] or ""), "logprob": entry[0], "bytes": None, "top_logprobs": []} for entry in sampled
        ]
    }
    return made


def _is_triple(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 3
