"""OpenAI Completions: `v1/completions`, text or token ids in, streaming and not, with `n`.

One prompt per call: a list of several prompts is refused by name, since it would be several actions under one
call.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from leyden.base.errors import RequestRefused
from leyden.gateway.dialects.base import (
    Body,
    Capture,
    Earlier,
    ModelRequest,
    event_bytes,
    refuse_unknown,
    take,
)
from leyden.gateway.dialects.openai_wire import (
    COMMON_FIELDS,
    DONE,
    ChoiceAssembly,
    ChunkTranslator,
    error_body,
    parse_alias,
    parse_sampling,
    parse_stream,
)
from leyden.traces.tokens import RawChoice

_FIELDS = COMMON_FIELDS | {"prompt", "echo", "best_of", "suffix"}
_TOP_FIELDS = ("id", "object", "created", "model", "system_fingerprint")
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class OpenAICompletions:
    """See `base.Dialect`."""

    name = "openai_completions"
    family = "openai"
    path = engine_path = "completions"
    id_header = b"x-request-id"

    def parse(self, body: Body) -> ModelRequest:
        """Read a body. Raises RequestRefused that names the field."""
        refuse_unknown(body, _FIELDS, "Completions")
        for key, neutral in (("echo", (None, False)), ("best_of", (None, 1)), ("suffix", (None, ""))):
            if body.get(key) not in neutral:
                raise RequestRefused(
                    f"{key} is {body[key]!r}, which is not supported", field=key, hint=f"leave {key} out"
                )
        _check_prompt(body.get("prompt"))
        logprobs = take(
            body, "logprobs", lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= 20,
            "a whole number from 0 to 20",
        )  # fmt: skip
        stream, usage_wanted = parse_stream(body)
        asked = parse_sampling(body, ("max_tokens",))
        return ModelRequest(
            dialect=self.name, body=body, alias=parse_alias(body), asked=asked, num_choices=asked.get("n", 1),
            stream=stream, usage_wanted=usage_wanted, logprobs_wanted=logprobs is not None,
            ids_wanted=bool(body.get("return_token_ids")),
        )  # fmt: skip

    def engine_body(self, request: ModelRequest, used: Mapping[str, Any], model: str) -> Body:
        """The body for the engine, with `used` sampling parameters."""
        body: Body = {"prompt": request.body["prompt"], **used, "model": model, "return_token_ids": True}
        body["logprobs"] = max(1, request.body.get("logprobs") or 0)
        if request.stream:
            body.update(stream=True, stream_options={"include_usage": True})
        return body

    def probe_body(self, model: str) -> Body:
        """The smallest request whose answer shows what an engine can return."""
        return {
            "model": model, "prompt": "hi", "max_tokens": 1, "temperature": 0.0, "logprobs": 1,
            "return_token_ids": True,
        }  # fmt: skip

    def capture(self, answer: Body) -> Capture:
        """Tokens of an engine's unstreamed answer; vLLM gives the prompt's ids with each choice."""
        prompt_ids = answer.get("prompt_token_ids")
        choices = []
        for choice in answer.get("choices") or ():
            prompt_ids = prompt_ids if prompt_ids is not None else choice.get("prompt_token_ids")
            choices.append(
                RawChoice(
                    index=choice.get("index", 0),
                    completion_ids=choice.get("token_ids"),
                    logprobs=(choice.get("logprobs") or {}).get("token_logprobs"),
                    finish_reason=choice.get("finish_reason") or "",
                    text=choice.get("text") or "",
                )
            )
        return Capture(prompt_ids=prompt_ids, choices=choices, usage=answer.get("usage") or {})

    def public(self, answer: Body, request: ModelRequest, call_id: str) -> Body:
        """What the harness gets of an unstreamed answer."""
        public = {key: answer[key] for key in _TOP_FIELDS if key in answer}
        public["model"] = request.alias
        public["choices"] = [_public_choice(choice, request) for choice in answer.get("choices") or ()]
        public["usage"] = answer.get("usage")
        return public

    def resolve(self, request: ModelRequest, earlier: Earlier) -> ModelRequest:
        """The request as it is: it refers to nothing."""
        return request

    def assembly(self, request: ModelRequest) -> "CompletionAssembly":
        """An empty copy for a stream."""
        return CompletionAssembly(request.num_choices)

    def translator(self, request: ModelRequest, call_id: str) -> "CompletionTranslator":
        """The way of a new stream."""
        return CompletionTranslator(request)

    def replay(self, response: Mapping[str, Any], request: ModelRequest) -> bytes:
        """A stored answer as a whole stream."""
        head = {key: response[key] for key in _TOP_FIELDS if key in response}
        usage = {"usage": None} if request.usage_wanted else {}
        chunks = [{**head, "choices": [choice], **usage} for choice in response.get("choices") or ()]
        if request.usage_wanted:
            chunks.append({**head, "choices": [], "usage": response.get("usage")})
        return b"".join(map(event_bytes, chunks)) + DONE

    def error_body(self, message: str, kind: str, field: str | None, hint: str | None) -> Body:
        """An error in the shape of the dialect."""
        return error_body(message, kind, field, hint)


class CompletionTranslator(ChunkTranslator):
    """See `base.Translator`."""

    def _public(self, chunk: Body, choices: Sequence[Body]) -> Body:
        request = self._request
        public = {key: chunk[key] for key in _TOP_FIELDS if key in chunk}
        public["model"] = request.alias
        public["choices"] = [_public_choice(choice, request) for choice in choices]
        if request.usage_wanted:
            public["usage"] = None if choices else chunk.get("usage")
        return public


class CompletionAssembly(ChoiceAssembly):
    """See `base.Assembly`."""

    TOP_FIELDS = _TOP_FIELDS

    def _fresh(self) -> Body:
        return {"text": ""}

    def _merge(self, choice: Body, piece: Body) -> None:
        choice["text"] += piece.get("text") or ""
        logprobs = piece.get("logprobs")
        if logprobs is not None:
            into = choice["logprobs"] = choice["logprobs"] or {}
            for key in _LISTS:
                if logprobs.get(key) is not None:
                    into.setdefault(key, []).extend(logprobs[key])
        if piece.get("prompt_token_ids") is not None:
            choice["prompt_token_ids"] = piece["prompt_token_ids"]


def _public_choice(choice: Body, request: ModelRequest) -> Body:
    public = {
        "index": choice.get("index", 0),
        "text": choice.get("text") or "",
        "finish_reason": choice.get("finish_reason"),
        "logprobs": choice.get("logprobs") if request.logprobs_wanted else None,
    }
    if request.ids_wanted:
        public |= {key: choice[key] for key in ("token_ids", "prompt_token_ids") if choice.get(key) is not None}
    return public


def _check_prompt(prompt: object) -> None:
    if isinstance(prompt, str) and prompt:
        return
    ids = isinstance(prompt, list) and prompt and all(type(item) is int and item >= 0 for item in prompt)
    if not ids:
        raise RequestRefused(
            "prompt must be one non-empty string or one list of token ids", field="prompt",
            hint="send several prompts as several requests",
        )  # fmt: skip
