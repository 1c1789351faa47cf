"""Does the agent's query give the rows of the reference on every database (SQLite files, PostgreSQL servers).

Promises: only reading is ever executed (read-only file, authorizer; at a server a read-only transaction), each query is
bounded in rows and seconds, at SQLite also in steps and value size. Several databases with the same schema and other
rows make a query that is right by chance rare. Row order counts only where the reference orders; column names never
count; numbers are equal to a relative 1e-6. A server must stand still while a verdict is found: the reference runs
each time.
"""

import math
import os
import re
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from leyden.base.errors import VerifierError
from leyden.rewards import postgres
from leyden.rewards.library.base import Evidence, Member, TextSettings, check_source

MAX_STEPS = 5_000_000
"""Virtual machine steps of a query; steps decide, so that a verdict does not depend on how busy the machine is."""
STEPS_PER_CHECK = 1_000
MAX_SECONDS = 10.0
"""Backstop only, for single steps that are slow."""
MAX_ROWS = 2_000
MAX_VALUE_BYTES = 4_000
"""With MAX_STEPS it bounds what a sort can pile up."""
SERVER = "env:"
"""Before the name of the variable that says where a server is."""
READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})

Rows = tuple[tuple[Any, ...], ...]


class SqlSettings(TextSettings):
    """`[rewards.settings.sql_rows]`"""

    sql: str = "sql"
    """Key of the task's answer with the reference query."""
    databases: str = "databases"
    """Key of the task's answer with a list of databases: files, or `env:NAME` for the PostgreSQL server whose
    connection string is in that environment variable."""
    root: str = "."
    """Folder of the files, relative to the configuration."""
    max_chars: int = Field(4_000, ge=1)
    """A longer query is not run."""

    @field_validator("source")
    @classmethod
    def _source(cls, value: str) -> str:
        check_source(value)
        return value


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a query."""

    rows: Rows | None
    """None when it failed or went over a bound."""
    read_only: bool
    """Whether nothing but reading was attempted."""
    error: str = ""
    """Why there are no rows."""


def run_reading(sql: str, database: Path | str) -> Ran:
    """Run one statement, read-only and bounded. Bad SQL does not raise; a database that is not there does.

    `database` is a file of SQLite, or `env:NAME` for a PostgreSQL server.
    """
    if isinstance(database, str):
        return _run_at_server(sql, database.removeprefix(SERVER))
    if not database.is_file():
        raise VerifierError(f"there is no database {database}; see rewards.settings.sql_rows.root")
    denied: list[int] = []

    def authorize(action: int, *_: str | None) -> int:
        if action in READS:
            return sqlite3.SQLITE_OK
        denied.append(action)
        return sqlite3.SQLITE_DENY

    connection = sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        _bound(connection)
        connection.set_authorizer(authorize)
        rows = connection.execute(sql).fetchmany(MAX_ROWS + 1)
    # sqlite3 answers a lone surrogate or a NUL in the query with a ValueError.
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        return Ran(None, not denied, str(error))
    finally:
        connection.close()
    if len(rows) > MAX_ROWS:
        return Ran(None, True, f"more than {MAX_ROWS} rows")
    return Ran(tuple(rows), True)


def same_rows(got: Sequence[tuple[Any, ...]], wanted: Sequence[tuple[Any, ...]], ordered: bool) -> bool:
    """Whether two results are equal, as lists if `ordered`, else as multisets; numbers to a relative 1e-6."""
    if len(got) != len(wanted):
        return False
    if not ordered:
        got, wanted = sorted(got, key=_key), sorted(wanted, key=_key)
    return all(
        len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(got, wanted, strict=True)
    )


def is_ordered(sql: str) -> bool:
    """Whether the outermost query has an ORDER BY outside quotes and brackets."""
    bare = re.sub(r"'(?:[^']|'')*'|\"[^\"]*\"", " ", sql)
    while (inner := re.sub(r"\([^()]*\)", " ", bare)) != bare:
        bare = inner
    return re.search(r"\border\s+by\b", bare, flags=re.IGNORECASE) is not None


def sql_match(sql: str, reference: str, databases: Sequence[Path | str]) -> float:
    """1.0 when `sql` gives the rows of `reference` on every database, else 0.0."""
    wanted = [
        _reference(reference, database)
        if isinstance(database, str)
        else _reference_of_file(reference, database.resolve())
        for database in databases
    ]
    ordered = is_ordered(reference)
    for database, rows in zip(databases, wanted, strict=True):
        ran = run_reading(sql, database)
        if ran.rows is None or not ran.read_only or not same_rows(ran.rows, rows, ordered=ordered):
            return 0.0
    return 1.0


def _reference(sql: str, database: Path | str) -> Rows:
    ran = run_reading(sql, database)
    if ran.rows is None:
        raise VerifierError(f"the reference query fails on {database}: {ran.error}: {sql}")
    return ran.rows


_reference_of_file = lru_cache(maxsize=4096)(_reference)


def _run_at_server(sql: str, variable: str) -> Ran:
    url = os.environ.get(variable, "")
    if not url:
        raise VerifierError(
            f"{SERVER}{variable} names an environment variable that is not set (LEYDEN_* never reaches a verifier); "
            "export the connection string of the PostgreSQL server"
        )
    answer = postgres.ask(url, sql, max_rows=MAX_ROWS + 1, timeout_s=MAX_SECONDS)
    if answer.rows is None:
        return Ran(None, not answer.wrote, answer.error)
    if answer.num_rows > MAX_ROWS:
        return Ran(None, True, f"more than {MAX_ROWS} rows")
    return Ran(tuple(tuple(map(_comparable, row)) for row in answer.rows), True)


def _comparable(value: Any) -> Any:
    """Decimals as numbers, since a query may compute the same in another type; NaN equals itself, as in PostgreSQL."""
    if not isinstance(value, Decimal | float):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(value).lower()


def _score(evidence: Evidence, settings: SqlSettings) -> dict[str, float]:
    reference = str(evidence.wanted(settings.sql))
    names = evidence.wanted(settings.databases)
    root = (evidence.base_dir / settings.root).resolve()
    named = [str(name) for name in (names if isinstance(names, list) else [names])]
    databases = [name if name.startswith(SERVER) else root / name for name in named]
    sql = evidence.text(settings.source).strip().rstrip(";")
    if not sql or len(sql) > settings.max_chars:
        sql_match("select 1", reference, databases)  # a broken task must not hide behind an empty answer
        return {"sql_rows": 0.0, "sql_executes": 0.0, "sql_reads_only": 1.0}
    first = run_reading(sql, databases[0])
    return {
        "sql_rows": sql_match(sql, reference, databases),
        "sql_executes": float(first.rows is not None),
        "sql_reads_only": float(first.read_only),
    }


def _bound(connection: sqlite3.Connection) -> None:
    deadline_s = time.monotonic() + MAX_SECONDS
    num_checks = [0]

    def is_over() -> bool:
        num_checks[0] += 1
        return num_checks[0] * STEPS_PER_CHECK > MAX_STEPS or time.monotonic() > deadline_s

    connection.set_progress_handler(is_over, STEPS_PER_CHECK)


def _same(a: object, b: object) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    return type(a) is type(b) and a == b


def _key(row: tuple[Any, ...]) -> tuple[list[tuple[int, float, str]], list[float]]:
    """Numbers by six digits first, so that results equal within the tolerance sort alike, then exactly."""
    coarse, exact = [], []
    for value in row:
        is_number = isinstance(value, int | float)
        coarse.append((1, float(f"{value:.6g}"), "") if is_number else (0 if value is None else 2, 0.0, repr(value)))
        exact.append(float(value) if is_number else 0.0)
    return coarse, exact


MEMBER = Member(
    name="sql_rows",
    says="a query gives the rows of the reference query on every one of several SQLite or PostgreSQL databases",
    settings=SqlSettings,
    score=_score,
    components=("sql_rows", "sql_executes", "sql_reads_only"),
    answer_key=lambda settings: settings.sql,
)
