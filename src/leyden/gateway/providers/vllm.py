"""vLLM's server and the embedded sampler: the format that the gateway speaks, so nothing is translated."""

from leyden.gateway.dialects.base import Body, ModelRequest


class VLLM:
    """See `base.Wire`."""

    name = "vllm"
    takes_seed = True
    lists_models = True
    whole_only = False
    flags = "Use a server that honours return_token_ids and logprobs (vLLM 0.10.2 or later does)"

    def url(self, endpoint: str, path: str) -> str:
        """Where a request goes; below `v1/` unless the path begins with a slash."""
        return f"{endpoint}{path}" if path.startswith("/") else f"{endpoint}/v1/{path}"

    def headers(self, key: str) -> dict[str, str]:
        """What it is sent with."""
        return {"authorization": f"Bearer {key}"} if key else {}

    def body(self, path: str, body: Body, request: ModelRequest | None) -> Body:
        """As it is."""
        return body

    def answer(self, path: str, answer: Body) -> Body:
        """As it is."""
        return answer

    def stream(self) -> None:
        """Nothing to translate."""
