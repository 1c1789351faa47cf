"""What SDKs look for beside the body of an answer: the id of a request, whether asking again can help, and the limits
that a provider tells of itself. Pure."""

import re
from collections.abc import Mapping

from leyden.base.errors import RequestRefused
from leyden.base.records import new_id
from leyden.gateway.client import Headers
from leyden.gateway.dialects.base import Dialect

FINAL = frozenset({"attempt_ended", "rollout_ended", "engine_incapable"})
"""Refusals that no retry changes, under statuses that SDKs ask again for (409 and 500 onwards)."""
_LIMIT = re.compile(r"(?:x-ratelimit-|anthropic-ratelimit-)[a-z0-9-]{1,64}")
_SHOWN = re.compile(r"[\x20-\x7e]{1,128}")
MAX_LIMITS = 32
"""Most headers that are passed on from a provider."""


def of_refusal(dialect: Dialect, refusal: RequestRefused) -> tuple[str, Headers]:
    """(id of a request that became no call, headers of its answer)."""
    request_id = new_id("req")
    headers: Headers = [(dialect.id_header, request_id.encode())]
    if refusal.kind in FINAL:
        headers.append((b"x-should-retry", b"false"))
    return request_id, headers


def limits_of(headers: Mapping[str, str]) -> Headers:
    """The limits that a provider names in its answer, as it names them."""
    found = [(name.lower(), value) for name, value in headers.items()]
    kept = [
        (name.encode(), value.encode()) for name, value in found if _LIMIT.fullmatch(name) and _SHOWN.fullmatch(value)
    ]
    return kept[:MAX_LIMITS]
