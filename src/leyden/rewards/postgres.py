"""One query at a PostgreSQL server, read only and bounded; psycopg comes with the extra `postgres`.

Promises: the text is one query (a cursor is declared for it, which the server refuses for anything else) in a
read-only transaction that is rolled back; only so many rows are held; the server ends it after the time limit, and
where the server no longer answers the connection is cut. Values are what PostgreSQL says: numbers, text, booleans,
bytes, NULL as None, arrays as lists; dates, times, JSON and what else JSON does not know as PostgreSQL writes them, in
UTC. Does not restrict what the role may call: a function with effects has them, so connect as a role that may only
read.
"""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from leyden.base.errors import VerifierError

AS_TEXT = ("date", "time", "timetz", "timestamp", "timestamptz", "interval", "json", "jsonb", "uuid", "inet", "cidr")
"""Types left as the server writes them: Python has no infinite date, and a number in JSON may lose digits."""
GRACE_S = 1.0
"""After its time limit a server that is well has said so; then the connection is cut."""
CHECKS_CONNECTION = 140000
"""From this version on a server can be told to notice, in the middle of a query, that its client is gone."""
_STATEMENT = re.compile(
    r"\s*(insert|update|delete|merge|create|drop|alter|truncate|grant|revoke|copy|call|do|set|lock|vacuum)\b", re.I
)
_CHANGES = re.compile(r"\b(insert|update|delete|merge)\b", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a query."""

    rows: list[tuple[Any, ...]] | None
    """The first rows; None when the query failed or went over its time."""
    num_rows: int = 0
    """Rows of the query, those that were not fetched included."""
    wrote: bool = False
    """Whether it tried to change something, which nothing comes of."""
    error: str = ""
    """Why there are no rows."""


def ask(url: str, query: str, *, max_rows: int, timeout_s: float) -> Answer:
    """The first `max_rows` rows of `query`. A query that fails does not raise; VerifierError when the server does."""
    psycopg = load()
    if "\0" in query:
        return Answer(rows=None, error="the query holds a NUL")
    wait_s = max(2, int(timeout_s))  # libpq waits no shorter
    try:
        connection = psycopg.connect(url, connect_timeout=wait_s, client_encoding="UTF8")
    except (psycopg.Error, OSError, ValueError) as error:
        raise VerifierError(f"no PostgreSQL server: {_said(error)}") from None
    cut = threading.Event()
    try:
        with _cut_after(connection, timeout_s + GRACE_S, cut):
            return _rows(connection, query, max_rows, timeout_s)
    except ValueError as error:  # a lone surrogate in the query, text that is no UTF-8 in the answer
        return Answer(rows=None, error=_said(error))
    except psycopg.Error as error:
        if cut.is_set():
            return Answer(rows=None, error=f"no answer within {timeout_s:g} s; the connection was cut")
        state = error.sqlstate or ""
        # 08: connection, 53: out of disk or memory, 57P: shutting down, 58 and XX: the server itself.
        if not state or state.startswith(("08", "53", "57P", "58", "XX")):
            raise VerifierError(f"the PostgreSQL server failed: {_said(error)}") from None
        wrote = state == "25006" or bool(_STATEMENT.match(query)) or (state == "0A000" and bool(_CHANGES.search(query)))
        return Answer(rows=None, wrote=wrote, error=_said(error))
    finally:
        with contextlib.suppress(psycopg.Error):
            connection.close()


def load() -> Any:
    """psycopg. Raises VerifierError where it is not installed."""
    try:
        import psycopg
    except ModuleNotFoundError:
        raise VerifierError("PostgreSQL needs psycopg; install it with: pip install 'leyden[postgres]'") from None
    return psycopg


def _rows(connection: Any, query: str, max_rows: int, timeout_s: float) -> Answer:
    from psycopg.types.string import TextLoader

    for name in AS_TEXT:
        connection.adapters.register_loader(name, TextLoader)
    connection.read_only = True
    settings = {"statement_timeout": f"{max(1, int(timeout_s * 1000))}", "timezone": "UTC", "datestyle": "ISO"}
    if connection.info.server_version >= CHECKS_CONNECTION:
        settings["client_connection_check_interval"] = "1000"
    for name, value in settings.items():
        connection.execute("select set_config(%s, %s, false)", (name, value))
    with connection.cursor(name="leyden") as cursor:
        cursor.execute(query)
        rows = cursor.fetchmany(max_rows)
        more = 0 if len(rows) < max_rows else connection.execute('move forward all in "leyden"').rowcount
    connection.rollback()
    return Answer(rows=rows, num_rows=len(rows) + more)


@contextlib.contextmanager
def _cut_after(connection: Any, limit_s: float, cut: threading.Event) -> Iterator[None]:
    """Shut the socket of `connection` after `limit_s`, so that whoever waits for it is woken."""
    with socket.socket(fileno=os.dup(connection.fileno())) as copy:

        def shut() -> None:
            cut.set()
            with contextlib.suppress(OSError):
                copy.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(limit_s, shut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _said(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
