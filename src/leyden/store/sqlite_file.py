"""An SQLite file: how it is opened, brought to this schema, and what its errors mean.

A newer store is refused before anything is changed; an older or empty one is migrated inside one transaction
that holds the write lock, so two processes that open a fresh file at once both find it finished.
"""

import os
import re
import sqlite3
import time
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from leyden.base.errors import (
    Conflict,
    LeydenError,
    NotFound,
    RecordError,
    SchemaTooNew,
    StoreError,
    StoreUnusable,
)
from leyden.store.schema import SCHEMA_VERSION

_LOST = (
    "SQLITE_BUSY",
    "SQLITE_CANTOPEN",
    "SQLITE_CORRUPT",
    "SQLITE_FULL",
    "SQLITE_IOERR",
    "SQLITE_LOCKED",
    "SQLITE_NOMEM",
    "SQLITE_NOTADB",
    "SQLITE_READONLY",
)
"""Errors after which no statement of the transaction can be trusted."""


def connect(path: Path, *, busy_timeout_s: float, create: bool = False) -> sqlite3.Connection:
    """A connection in autocommit mode (transactions are begun by hand) that any one thread at a time may
    use."""
    return sqlite3.connect(
        f"file:{quote(str(path))}?mode={'rwc' if create else 'rw'}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=busy_timeout_s,
        cached_statements=256,
    )


def prepare(path: Path, *, create: bool, busy_timeout_s: float) -> None:
    """Bring `path` to SCHEMA_VERSION in WAL mode. Raises StoreUnusable or SchemaTooNew; see the module."""
    _check_place(path, create)
    try:
        connection = connect(path, busy_timeout_s=busy_timeout_s, create=create)
    except sqlite3.Error as error:
        raise explain(error, path, busy_timeout_s) from error
    try:
        version = _version(connection, path)
        if version is None or version < SCHEMA_VERSION:
            _migrate(path, busy_timeout_s)
        _use_wal(connection, busy_timeout_s)
        # Taking the write lock once shows a locked or read-only file now and not at the first record.
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except (sqlite3.Error, DBAPIError) as error:
        raise explain(error, path, busy_timeout_s) from error
    finally:
        connection.close()


def is_lost(error: BaseException) -> bool:
    """Whether `error` ends the whole transaction and not one statement of it."""
    name = _name(error)
    return name is not None and name.startswith(_LOST)


def explain(error: BaseException, path: Path, busy_timeout_s: float) -> BaseException:
    """`error` of the database as an error of the house; any other error as it is."""
    name = _name(error)
    if isinstance(error, LeydenError) or name is None:
        return error
    reason = str(error.orig if isinstance(error, DBAPIError) else error)
    if name in ("SQLITE_CONSTRAINT_PRIMARYKEY", "SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_ROWID"):
        return Conflict(f"a row with this key exists already in {path}: {reason}; use another id or read that row")
    if name == "SQLITE_CONSTRAINT_FOREIGNKEY":
        return NotFound(f"a row refers to one that is not in {path}: {reason}; record the row it belongs to first")
    if name.startswith("SQLITE_CONSTRAINT"):
        return RecordError(f"a row does not fit its table in {path}: {reason}; give every column that may not be null")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreUnusable(
            f"store {path} was locked by another process for more than {busy_timeout_s:g} s ({reason}); "
            "end the process that holds it, or give this run a store of its own"
        )
    if name.startswith("SQLITE_FULL"):
        return StoreUnusable(
            f"the disk of store {path} is full ({reason}); nothing of this transaction was recorded: "
            "free space there and try again"
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return StoreUnusable(
            f"store {path} cannot be written ({reason}); make the file and its folder writable for this "
            "user, or choose another store.url"
        )
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return StoreUnusable(
            f"{path} is not a store, or it is damaged ({reason}); choose another store.url, or restore it"
        )
    if name.startswith("SQLITE_IOERR"):
        return StoreUnusable(f"the disk of store {path} failed ({reason}); check the disk, then open it again")
    return StoreError(f"store {path}: {reason} ({name})")


def _name(error: BaseException) -> str | None:
    """SQLite's name of the error, `SQLITE` if it has none; None if it is no error of the database."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if not isinstance(cause, sqlite3.Error):
        return None
    return getattr(cause, "sqlite_errorname", None) or "SQLITE"


def _check_place(path: Path, create: bool) -> None:
    if path.is_dir():
        raise StoreUnusable(f"{path} is a folder; store.url must name a file in it, for example {path / 'leyden.db'}")
    if not path.parent.is_dir():
        raise StoreUnusable(f"there is no folder {path.parent} for the store {path.name}; create it first")
    if not path.exists():
        if not create:
            raise StoreUnusable(f"there is no store {path}; check store.url, or record something first")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise StoreUnusable(f"no store can be made in {path.parent}: make the folder writable for this user")
    elif not os.access(path, os.R_OK | os.W_OK):
        raise StoreUnusable(f"store {path} is read-only for this user; make it writable, or choose another store.url")
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        raise StoreUnusable(f"the folder {path.parent} is read-only, and SQLite writes a log into it; make it writable")


def _version(connection: sqlite3.Connection, path: Path) -> str | None:
    """Revision of the file, None for an empty one. SchemaTooNew and StoreUnusable as in `prepare`."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return None
    rows = (
        connection.execute("SELECT version_num FROM alembic_version").fetchall() if "alembic_version" in tables else []
    )
    version = rows[0][0] if len(rows) == 1 else None
    if version is None or not re.fullmatch(r"\d{4}", str(version)):
        raise StoreUnusable(
            f"{path} is an SQLite file, but no store of Leyden (tables: {', '.join(sorted(tables)[:5])}); "
            "choose another store.url"
        )
    if version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"store {path} has schema {version}, this Leyden knows {SCHEMA_VERSION}; upgrade Leyden, or use "
            "another store. Nothing was changed"
        )
    return str(version)


def _use_wal(connection: sqlite3.Connection, busy_timeout_s: float) -> None:
    """Switch to write-ahead logging. SQLite does not wait for readers here by itself, so this asks again."""
    deadline = time.monotonic() + busy_timeout_s
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
            if mode != "wal":
                mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode == "wal":
                return
        except sqlite3.OperationalError as error:
            if not (_name(error) or "").startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                raise
        else:
            raise StoreUnusable(f"the file system of the store has no write-ahead log (mode {mode}); use a local disk")
        time.sleep(0.01)


def _migrate(path: Path, busy_timeout_s: float) -> None:
    """Run the missing revisions in one transaction; a no-op if another process was faster."""
    # Imported here: Alembic takes longer to import than a finished store takes to open.
    from alembic import command
    from alembic.config import Config

    raw = connect(path, busy_timeout_s=busy_timeout_s)
    with create_engine("sqlite://", creator=lambda: raw, poolclass=NullPool).connect() as connection:
        # Begins SQLAlchemy's transaction too, which Alembic joins; what is not committed here is rolled back.
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        version = _version(raw, path)
        if version is None or version < SCHEMA_VERSION:
            config = Config()
            config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        connection.commit()
