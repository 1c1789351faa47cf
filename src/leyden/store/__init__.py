"""Durable tables and transactions. `open_store(url)` is the only way in; the contract is in `base`."""

from typing import Literal

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from leyden.base.errors import ConfigError
from leyden.store.base import Store

__all__ = ["Store", "open_store"]


def open_store(url: str, *, synchronous: Literal["full", "normal"] = "normal", create: bool = True) -> Store:
    """The store at `url`, migrated to this schema; a fresh file is made unless `create` is False.

    Raises ConfigError for a URL that no store here understands, SchemaTooNew for a store that a newer Leyden
    wrote (nothing is changed), StoreUnusable for a file that is locked, read-only or no store.
    """
    try:
        scheme = make_url(url).get_backend_name()
    except ArgumentError:
        raise ConfigError(f"store.url {url!r} is not a URL; write for example sqlite:///leyden.db") from None
    if scheme == "sqlite":
        from leyden.store.sqlite import SqliteStore

        return SqliteStore(url, synchronous=synchronous, create=create)
    planned = " (PostgreSQL is planned as an extra named postgres; it is not there yet)"
    raise ConfigError(
        f"store.url names {scheme!r}, which is not supported{planned if scheme == 'postgresql' else ''}; "
        "supported is sqlite, for example sqlite:///leyden.db"
    )
