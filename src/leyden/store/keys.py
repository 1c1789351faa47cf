"""Service keys: who may send live traffic. Only hashes are stored; a revoked key stays, so that its name does.

Functions over a connection. Changes bump topic `keys`.
"""

import time
from dataclasses import dataclass

from sqlalchemy import Connection, insert, select, update

from leyden.base.errors import Conflict, NotFound
from leyden.store.base import Store
from leyden.store.schema import service_keys

TOPIC = "keys"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceKey:
    """A key of a service that uses a policy."""

    key_id: str
    """Unique in the store; not secret."""
    name: str
    """Of the service."""
    key_hash: str
    """SHA-256 of the key."""
    created_at: float
    """Seconds since the epoch."""
    revoked_at: float | None
    """None while it may be used."""


def add(conn: Connection, store: Store, key_id: str, name: str, key_hash: str) -> ServiceKey:
    """Register a key. Conflict if the service has one that is not revoked."""
    if any(key.name == name and key.revoked_at is None for key in every(conn)):
        raise Conflict(f"service {name!r} has a key; revoke it first, or choose another name")
    conn.execute(insert(service_keys).values(key_id=key_id, name=name, key_hash=key_hash, created_at=time.time()))
    store.changed(conn, TOPIC)
    return next(key for key in every(conn) if key.key_id == key_id)


def every(conn: Connection) -> list[ServiceKey]:
    """All keys, oldest first."""
    rows = conn.execute(select(service_keys).order_by(service_keys.c.created_at, service_keys.c.key_id))
    return [ServiceKey(**row._mapping) for row in rows]


def revoke(conn: Connection, store: Store, key_id: str) -> None:
    """End a key; again is no error. NotFound."""
    found = conn.execute(select(service_keys).where(service_keys.c.key_id == key_id)).one_or_none()
    if found is None:
        raise NotFound(f"there is no service key {key_id!r}")
    if found.revoked_at is None:
        conn.execute(update(service_keys).where(service_keys.c.key_id == key_id).values(revoked_at=time.time()))
        store.changed(conn, TOPIC)
