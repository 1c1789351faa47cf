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

_FIELDS = {b"x-leyden-session": 128, b"x-leyden-subject": 128, b"x-leyden-purpose": 64}
"""Header to its most characters, as the columns have them."""
_SHOWN = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
"""Printable ASCII: these values come back in reports, headers and shells."""


def live_origin(caller: Caller, headers: Mapping[bytes, bytes]) -> LiveOrigin:
    """The record of a live call. Raises RequestRefused that names the header."""
    found: dict[str, str] = {}
    for name, most in _FIELDS.items():
        value = headers.get(name)
        if value is None:
            continue
        if len(value) > most or not _SHOWN.fullmatch(value):
            raise RequestRefused(
                f"header {name.decode()} has {len(value)} bytes or characters that cannot be shown",
                field=name.decode(), hint=f"send 1 to {most} printable ASCII characters",
            )  # fmt: skip
        found[name.decode().removeprefix("x-leyden-")] = value.decode("ascii")
    return LiveOrigin(service=caller.service or caller.role, **found)


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
