"""Who is calling: administrator, runner, a service, or one attempt by its own random key.

Attempt and service keys live in the store as SHA-256 hashes and in this process as a bounded cache. Whether an attempt
has ended is checked on every call: the store pushes a count of changes, so the check is one comparison unless
something changed. Keys never reach a log, a record or an error message.
"""

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, NamedTuple

from sqlalchemy import Connection

from leyden.base.errors import NotFound, RequestRefused
from leyden.base.records import Attempt, Rollout, check_id, new_id
from leyden.gateway.changes import Changes
from leyden.gateway.ledger import Book
from leyden.store import aio, keys, queue
from leyden.store.base import Store
from leyden.store.keys import ServiceKey

Role = Literal["admin", "runner", "attempt", "service"]

OWN_ATTEMPTS = "att_"
"""Ids of attempts that the queue made begin so; others were named by a controller."""
SERVICE_PREFIX = b"ls-"
"""Keys of services begin so."""
MAX_CACHED = 20_000
"""Attempts kept in memory; ten times the rollouts in flight that the project aims at."""
MAX_REFUSALS = 20
"""Refused calls recorded per attempt: enough for a diagnosis, and a loop cannot fill the store."""


class KnownAttempt:
    """An attempt that has called, with what the gateway keeps about it between calls."""

    __slots__ = ("attempt", "book", "num_refusals", "rollout", "seen")

    def __init__(self, attempt: Attempt, rollout: Rollout, seen: int) -> None:
        self.attempt = attempt
        self.rollout = rollout
        self.seen = seen
        self.book = Book(attempt.id)
        self.num_refusals = 0


class Caller(NamedTuple):
    """Who calls and, for model calls of an attempt, which."""

    role: Role
    """What the key may do."""
    known: KnownAttempt | None = None
    """The attempt that an attempt key belongs to."""
    service: str = ""
    """Name of the service that a service key belongs to."""


def make_token(prefix: str = "lk-") -> str:
    """A fresh key, 256 random bits."""
    return prefix + secrets.token_urlsafe(32)


def add_service_key(connection: Connection, store: Store, name: str) -> tuple[ServiceKey, str]:
    """Make a key for a service: (what is stored, the key itself, which is shown once). Conflict, RecordError."""
    key = make_token(SERVICE_PREFIX.decode())
    digest = hashlib.sha256(key.encode()).hexdigest()
    return keys.add(connection, store, new_id("key"), check_id(name, "the name of a service"), digest), key


class Keys:
    """Turns a key into a caller."""

    def __init__(self, store: Store, *, admin_key: str, runner_key: str) -> None:
        self._store = store
        self._changes = Changes(store, queue.TOPIC)
        self._service_changes = Changes(store, keys.TOPIC)
        self._services: dict[bytes, ServiceKey] = {}
        self._services_seen = -1
        self._fixed: tuple[tuple[bytes, Caller], ...] = (
            (admin_key.encode(), Caller("admin")),
            (runner_key.encode(), Caller("runner")),
        )
        self._cache: OrderedDict[object, KnownAttempt] = OrderedDict()

    async def caller(self, key: bytes | None) -> Caller:
        """Who has this key. Raises RequestRefused: 401 unknown, 409 the attempt has ended."""
        if not key:
            raise RequestRefused(
                "no key was sent", status=401, kind="authentication_error",
                hint="send Authorization: Bearer KEY or x-api-key: KEY",
            )  # fmt: skip
        for fixed, caller in self._fixed:
            if hmac.compare_digest(fixed, key):
                return caller
        if key.startswith(SERVICE_PREFIX):
            return await self._service(key)
        token = key.decode("latin-1")
        known = await self._fresh(
            hashlib.sha256(key).digest(), lambda connection: queue.attempt_by_token(connection, token)
        )
        if known is None:
            raise RequestRefused(
                "this key is not known here", status=401, kind="authentication_error",
                hint="an attempt's key is in OPENAI_API_KEY of its environment",
            )  # fmt: skip
        return Caller("attempt", known)

    async def _service(self, key: bytes) -> Caller:
        """The service of a key. The table is small and read whole when it changes."""
        changes = self._service_changes.count()
        if changes != self._services_seen:
            found = await aio.read(self._store, keys.every)
            self._services = {bytes.fromhex(one.key_hash): one for one in found}
            self._services_seen = changes
        one = self._services.get(hashlib.sha256(key).digest())
        if one is None or one.revoked_at is not None:
            raise RequestRefused(
                "this service key is not known here" if one is None else f"the key of {one.name!r} was revoked",
                status=401, kind="authentication_error", hint="ask the administrator for a new one",
            )  # fmt: skip
        return Caller("service", service=one.name)

    async def attempt(self, rollout_id: str, attempt_id: str) -> KnownAttempt:
        """The attempt of a path, for administrator and runner. Raises RequestRefused: 404, 409."""
        known = await self._fresh(
            (rollout_id, attempt_id), lambda connection: _by_id(connection, rollout_id, attempt_id)
        )
        if known is None:
            raise RequestRefused(
                f"there is no attempt {attempt_id} of a rollout {rollout_id}", status=404, kind="not_found"
            )
        return known

    async def refresh(self, known: KnownAttempt) -> None:
        """Read an attempt again if anything changed since it was read."""
        changes = self._changes.count()
        if known.seen != changes:
            rollout_id, attempt_id = known.rollout.id, known.attempt.id
            found = await aio.read(self._store, lambda connection: _by_id(connection, rollout_id, attempt_id))
            if found is not None:
                known.attempt, known.rollout = found
                known.seen = changes

    async def rollout_exists(self, rollout_id: str) -> None:
        """RequestRefused (404) if there is no such rollout."""
        try:
            await aio.read(self._store, lambda connection: queue.get(connection, rollout_id))
        except NotFound:
            raise RequestRefused(f"there is no rollout {rollout_id}", status=404, kind="not_found") from None

    def still_runs(self, known: KnownAttempt) -> None:
        """RequestRefused (409) if the attempt has ended."""
        attempt, rollout = known.attempt, known.rollout
        if attempt.ended_at is not None:
            raise RequestRefused(
                f"attempt {attempt.id} has ended ({attempt.outcome or 'no outcome'}); its key is dead",
                status=409, kind="attempt_ended", hint="a retry is a new attempt with a key of its own",
            )  # fmt: skip
        if rollout.state in ("succeeded", "failed"):
            raise RequestRefused(
                f"rollout {rollout.id} is {rollout.state}; it takes no more calls",
                status=409,
                kind="rollout_ended",
            )

    async def _fresh(
        self, slot: object, load: Callable[[Connection], tuple[Attempt, Rollout] | None]
    ) -> KnownAttempt | None:
        """The cached attempt if nothing changed since it was read, else a fresh reading."""
        known = self._cache.get(slot)
        changes = self._changes.count()
        if known is not None and known.seen == changes:
            return known
        found = await aio.read(self._store, load)
        if found is None:
            self._cache.pop(slot, None)
            return None
        known = self._cache.get(slot)  # another call may have loaded it meanwhile; its book must stay the only one
        if known is None or known.attempt.id != found[0].id:
            known = self._cache[slot] = self._same_attempt(found[0].id) or KnownAttempt(*found, changes)
            self._evict()
        known.attempt, known.rollout = found
        known.seen = changes
        return known

    def _same_attempt(self, attempt_id: str) -> KnownAttempt | None:
        """The attempt under its other slot (key or path), so that it has one book."""
        return next((known for known in self._cache.values() if known.attempt.id == attempt_id), None)

    def _evict(self) -> None:
        while len(self._cache) > MAX_CACHED:
            slot, known = next(iter(self._cache.items()))
            if known.book.busy:
                self._cache.move_to_end(slot)
                return
            del self._cache[slot]


def external_attempt(rollout_id: str, attempt_id: str) -> str:
    """Stored id of an attempt that a controller outside named; its names are unique within a rollout only."""
    return f"{rollout_id}.{attempt_id}"


def _by_id(connection: Connection, rollout_id: str, attempt_id: str) -> tuple[Attempt, Rollout] | None:
    try:
        rollout = queue.get(connection, rollout_id)
    except NotFound:
        return None
    for attempt in queue.attempts(connection, rollout_id):
        if attempt.id in (attempt_id, external_attempt(rollout_id, attempt_id)):
            return attempt, rollout
    return None
