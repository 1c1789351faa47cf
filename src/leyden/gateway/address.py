"""The three addresses of a model call: an attempt's path, the same without `openai` or `anthropic`, and a path
that says nothing.

/proxy/rollout/{rollout}/attempt/{attempt}/mode/{train,val}/openai/v1/chat/completions
/openai/v1/chat/completions        the key alone says who calls
/v1/chat/completions               the same
"""

import re
from dataclasses import dataclass

from leyden.gateway.dialects import DIALECTS, Dialect

_PATHS = {dialect.path: dialect for dialect in DIALECTS}
_MODEL_CALL = re.compile(
    r"(?:/proxy/rollout/([^/]+)/attempt/([^/]+)(?:/mode/(train|val))?)?(?:/(openai|anthropic))?/v1/("
    + "|".join(map(re.escape, _PATHS))
    + r")/?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """What a path says about a model call."""

    path: str
    """As it came."""
    dialect: Dialect
    """Which API."""
    rollout_id: str | None = None
    """None where the key alone says who calls."""
    attempt_id: str | None = None
    """Set together with `rollout_id`."""
    mode: str | None = None
    """`train` or `val`, if the path says it."""


def read_address(path: str) -> Address | None:
    """The address of a model call, None if the path is none."""
    match = _MODEL_CALL.fullmatch(path)
    if match is None:
        return None
    rollout_id, attempt_id, mode, family, kind = match.groups()
    dialect = _PATHS[kind]
    if family is not None and family != dialect.family:
        return None
    return Address(path=path, dialect=dialect, rollout_id=rollout_id, attempt_id=attempt_id, mode=mode)
