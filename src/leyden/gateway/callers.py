"""Which attempt a call belongs to, and who is behind live traffic: the service by its key, session, subject and
purpose by its headers.

Headers are checked like any input: what cannot be recorded as it is, is refused by name. On calls of an attempt they
are not read, since the rollout says all of it.
"""

import re
from collections.abc import Mapping

from leyden.base.errors import RequestRefused
from leyden.base.records import LiveOrigin
from leyden.gateway.address import Address
from leyden.gateway.auth import Caller, Keys, KnownAttempt

_MOST = {"session": 128, "subject": 128, "purpose": 64}
"""Longest value of each field, as the columns have them."""
_FIELDS = {f"x-leyden-{name}".encode(): name for name in _MOST}
"""Header to field."""
_SHOWN = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
"""Printable ASCII: these values come back in reports, headers and shells."""


def live_origin(caller: Caller, headers: Mapping[bytes, bytes]) -> LiveOrigin:
    """The record of a live call. Raises RequestRefused that names the header."""
    told = {name: (header.decode(), headers[header]) for header, name in _FIELDS.items() if header in headers}
    return origin_of(caller.service or caller.role, told, "header ")


def origin_of(service: str, told: Mapping[str, tuple[str, bytes]], kind: str) -> LiveOrigin:
    """Who is behind a live call; `told` has by field where it was said and what. Raises RequestRefused."""
    found: dict[str, str] = {}
    for name, (where, value) in told.items():
        most = _MOST[name]
        if len(value) > most or not _SHOWN.fullmatch(value):
            raise RequestRefused(
                f"{kind}{where} has {len(value)} bytes or characters that cannot be shown",
                field=where, hint=f"send 1 to {most} printable ASCII characters",
            )  # fmt: skip
        found[name] = value.decode("ascii")
    return LiveOrigin(service=service, **found)


async def attempt_of(keys: Keys, caller: Caller, address: Address) -> KnownAttempt | None:
    """The attempt that a call belongs to, None for live traffic. Raises RequestRefused when path and key
    disagree."""
    known = caller.known
    if address.rollout_id is None:
        return known
    assert address.attempt_id is not None
    if caller.role == "service":
        raise RequestRefused(
            "a service key cannot call for a rollout", status=403, kind="permission_error",
            hint="use the base URL that ends in /v1, without /proxy",
        )  # fmt: skip
    if caller.role != "attempt":
        known = await keys.attempt(address.rollout_id, address.attempt_id)
    assert known is not None
    if known.rollout.id != address.rollout_id:
        await keys.rollout_exists(address.rollout_id)
    if known.rollout.id != address.rollout_id or (caller.role == "attempt" and known.attempt.id != address.attempt_id):
        raise RequestRefused(
            f"this key belongs to another attempt than {address.attempt_id} of rollout {address.rollout_id}",
            status=403, kind="permission_error", hint="use the base URL and the key of the same environment",
        )  # fmt: skip
    if address.mode is not None and address.mode != known.rollout.mode:
        raise RequestRefused(
            f"the path says mode {address.mode}, rollout {known.rollout.id} has mode {known.rollout.mode}",
            status=403, kind="permission_error",
        )  # fmt: skip
    return known
