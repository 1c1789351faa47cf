"""A provider with OpenAI's Chat Completions (and Completions) API. It returns no token ids.

What only engines know is left out, and so are values that are the API's own defaults: some models refuse the
field whatever its value.
"""

from leyden.gateway.dialects.base import Body, ModelRequest

_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "n": 1}


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
        """The request without what only engines know."""
        sent = {k: v for k, v in body.items() if k != "return_token_ids" and _DEFAULTS.get(k) != v}
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
