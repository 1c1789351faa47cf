"""A provider with OpenAI's Chat Completions (and Completions) API. It returns no token ids.

What only engines know is left out, and so are values that are the API's own defaults: some models refuse the
field whatever its value.
"""

from leyden.base.errors import RequestRefused
from leyden.gateway.dialects.base import BUDGET, Body, ModelRequest

_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "n": 1}
_OF_ENGINES = frozenset({"return_token_ids", "chat_template_kwargs", "add_generation_prompt", BUDGET})


class OpenAI:
    """See `base.Wire`."""

    name = "openai"
    takes_seed = False
    lists_models = False
    whole_only = False
    flags = "A provider returns no token ids"

    def __init__(self, max_tokens_field: str = "max_tokens") -> None:
        self._max_tokens_field = max_tokens_field

    def url(self, endpoint: str, path: str) -> str:
        """Where a request goes; the base URL ends in `/v1` where the provider has that."""
        return f"{endpoint}/{path}"

    def headers(self, key: str) -> dict[str, str]:
        """What it is sent with."""
        return {"authorization": f"Bearer {key}"} if key else {}

    def body(self, path: str, body: Body, request: ModelRequest | None) -> Body:
        """The request without what only engines know. Raises RequestRefused where that would change the answer."""
        if body.get("continue_final_message"):
            raise _refused("an answer that is begun", "end with a message of the user", field="messages")
        if any(body.get("chat_template_kwargs", {}).values()):
            raise _refused("thinking", "send output_config.effort instead", field="thinking")
        sent = {k: v for k, v in body.items() if k not in _OF_ENGINES and _DEFAULTS.get(k) != v}
        if request is not None and not request.logprobs_wanted:
            sent.pop("logprobs", None)
        if path == "chat/completions" and "max_tokens" in sent:
            sent[self._max_tokens_field] = sent.pop("max_tokens")
        return sent

    def answer(self, path: str, answer: Body) -> Body:
        """As it is."""
        return answer

    def stream(self) -> None:
        """Nothing to translate."""


def _refused(what: str, hint: str, *, field: str) -> RequestRefused:
    return RequestRefused(f"the provider behind this model (OpenAI's API) cannot honour {what}", field=field, hint=hint)
