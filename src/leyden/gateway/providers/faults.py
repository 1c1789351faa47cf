"""What a provider's refusal means, as a named error. Neither its key nor the request is in any message."""

import time
from email.utils import parsedate_to_datetime

from leyden.base.errors import EngineUnreachable, ProviderError
from leyden.gateway.providers.base import Provider
from leyden.gateway.stream import read_json

BUSY = frozenset({429, 503, 529})
"""The provider took nothing, so the call may be sent again."""
MAX_MESSAGE = 500
"""Characters of a provider's own words that are passed on."""


def fault_of(provider: Provider, status: int, raw: bytes, retry_after_s: float | None) -> ProviderError:
    """The named error of an answer that is no 200."""
    said = _message(raw)
    who = f"provider {provider.name!r}"
    if status in (401, 403):
        return ProviderError(
            f"{who} refused its key (status {status}: {said}); check the variable that "
            f"providers.{provider.name}.key_env names, and what that key may do",
            kind="provider_authentication", http_status=502, status=status,
        )  # fmt: skip
    if status == 429:
        return ProviderError(
            f"{who} limits its rate (status 429: {said}); send fewer calls at once, or ask it for a higher limit",
            kind="provider_rate_limited", http_status=429, status=status, retry_after_s=retry_after_s,
        )  # fmt: skip
    if status in BUSY:
        return ProviderError(
            f"{who} is overloaded (status {status}: {said}); try again later",
            kind="provider_overloaded", http_status=503, status=status, retry_after_s=retry_after_s,
        )  # fmt: skip
    if 400 <= status < 500:
        return ProviderError(
            f"{who} refused the request (status {status}): {said}",
            kind="provider_refused", http_status=status, status=status,
        )  # fmt: skip
    return ProviderError(
        f"{who} failed (status {status}: {said})", kind="provider_failed", http_status=502, status=status
    )


def late(provider: Provider) -> ProviderError:
    """The error of an answer that did not come in time; it may have been sampled, so it is not asked for again."""
    return ProviderError(
        f"provider {provider.name!r} did not answer within its {provider.timeout_s:g} s; raise "
        f"providers.{provider.name}.timeout_s, or ask for fewer tokens",
        kind="provider_timeout", http_status=504,
    )  # fmt: skip


def retry_after_of(value: str | None) -> float | None:
    """Seconds that a `retry-after` header asks for; None if it says nothing that can be read."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def told(error: BaseException) -> tuple[int, str, float | None]:
    """(status, kind, seconds to wait) of what a client is told about an engine's or a provider's failure."""
    if isinstance(error, ProviderError):
        return error.http_status, error.kind, error.retry_after_s
    return 502, "engine_unreachable" if isinstance(error, EngineUnreachable) else "engine_error", None


def _message(raw: bytes) -> str:
    answer = read_json(raw)
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    text = str(error.get("message") or error) if isinstance(error, dict) else str(error or "it gave no reason")
    return text[:MAX_MESSAGE]
