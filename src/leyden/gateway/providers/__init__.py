"""What stands behind an alias. The registry is closed: kinds of engines and kinds of providers."""

from leyden.base.config import ProviderConfig
from leyden.gateway.providers.anthropic import Anthropic
from leyden.gateway.providers.base import Headed, Provider, Response, Translated, Wire, cost_usd
from leyden.gateway.providers.openai import OpenAI
from leyden.gateway.providers.sglang import SGLang
from leyden.gateway.providers.vllm import VLLM

__all__ = ["ENGINES", "PLAIN", "Headed", "Provider", "Response", "Translated", "Wire", "cost_usd", "wire_of"]

PLAIN: Wire = VLLM()
"""The format that needs no translation."""
ENGINES: dict[str, Wire] = {"vllm": PLAIN, "sglang": SGLang()}
"""By `policies.NAME.engine_kind`."""
BASE_URLS = {"openai": "https://api.openai.com/v1", "anthropic": "https://api.anthropic.com"}
"""Where a provider without a `base_url` is, by its kind."""


def wire_of(provider: ProviderConfig) -> Wire:
    """The format of a provider."""
    return Anthropic() if provider.kind == "anthropic" else OpenAI(provider.max_tokens_field)
