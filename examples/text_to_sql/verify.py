"""Scores the query in `answer.sql` by running it on the task's databases.

Promises: only reading is ever executed (read-only file, authorizer), every query is bounded in steps,
seconds, rows and value size, and no answer of an agent, however bad, raises. Raises `BrokenTaskError` when
the task itself is at fault: a missing database, or reference SQL that does not run.

Components: `correct` (rows equal those of the reference on every database, and nothing but reading was
attempted), `executes` (runs on the first database), `safe` (nothing but reading was attempted), `tokens`
(completion tokens). Row order counts only where the reference orders; column names never count. Shapes:
none.
"""

import math
import os
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

ANSWER_FILE = "answer.sql"
MAX_ANSWER_BYTES = 4_000
MAX_STEPS = 5_000_000  # steps decide, so a verdict does not depend on how busy the machine is
STEPS_PER_CHECK = 1_000
MAX_SECONDS = 10.0  # backstop only, for single steps that are slow
MAX_ROWS = 2_000
MAX_VALUE_BYTES = 4_000  # no reference value comes near; with MAX_STEPS it bounds what a sort can pile up
RELATIVE_TOLERANCE = 1e-6

READS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
READ_VERBS = frozenset({"select", "with", "values", "explain"})
WRITE_VERBS = frozenset(
    (
        *("insert", "update", "delete", "replace", "drop", "create", "alter", "attach", "detach", "pragma"),
        *("vacuum", "reindex", "analyze", "begin", "commit", "end", "rollback", "savepoint", "release"),
    )
)

Row = tuple[Any, ...]


class BrokenTaskError(ValueError):
    """The task cannot be verified: its database is missing or its reference SQL does not run."""


@dataclass(frozen=True)
class Outcome:
    rows: tuple[Row, ...] | None
    """Result rows; None when the query failed or went over a bound."""
    is_safe: bool
    """Whether nothing but reading was attempted."""
    error: str = ""
    """Why there are no rows."""


def verify(task: Mapping[str, Any], trace: Mapping[str, Any], workspace: Path) -> dict[str, float]:
    """Scores one finished rollout; see the module docstring for the components and for what raises."""
    gold = str(task["answer"]["sql"])
    databases = [database_path(str(name)) for name in task["answer"]["databases"]]
    if not databases:
        raise BrokenTaskError(f"task {task.get('id')!r} names no database in answer.databases")
    wanted = [_gold_rows(gold, database) for database in databases]
    sql = read_answer(Path(workspace))
    outcomes = [run_query(sql, database) for database in databases]
    is_safe = all(outcome.is_safe for outcome in outcomes)
    is_correct = is_safe and all(
        outcome.rows is not None and same_rows(outcome.rows, rows, ordered=is_ordered(gold))
        for outcome, rows in zip(outcomes, wanted, strict=True)
    )
    return {
        "correct": float(is_correct),
        "executes": float(outcomes[0].rows is not None),
        "safe": float(is_safe),
        "tokens": float(trace["num_completion_tokens"]),
    }


def read_answer(workspace: Path) -> str:
    """The query that the harness left, or an empty string when it left none that can be read."""
    try:
        if not (workspace / ANSWER_FILE).is_file():  # opening a pipe would wait for a writer
            return ""
        with open(workspace / ANSWER_FILE, "rb") as file:
            data = file.read(MAX_ANSWER_BYTES + 1)
        return "" if len(data) > MAX_ANSWER_BYTES else data.decode("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def database_path(name: str) -> Path:
    """A task's database: absolute, or under TEXT_TO_SQL_DATA, the working directory or `data` here."""
    roots = [Path.cwd(), Path(__file__).resolve().parent / "data"]
    if "TEXT_TO_SQL_DATA" in os.environ:
        roots.insert(0, Path(os.environ["TEXT_TO_SQL_DATA"]))
    for root in roots:
        if (root / name).is_file():
            return (root / name).resolve()
    raise BrokenTaskError(
        f"no database {name!r} under {', '.join(map(str, roots))}: run the generator or the importer again, "
        "or set TEXT_TO_SQL_DATA to the folder that it wrote"
    )


@lru_cache(maxsize=4096)
def _gold_rows(sql: str, database: Path) -> tuple[Row, ...]:
    outcome = run_query(sql, database)
    if outcome.rows is None or not outcome.is_safe:
        raise BrokenTaskError(f"reference SQL fails on {database}: {outcome.error or 'it is not a read'}: {sql}")
    return outcome.rows


def run_query(sql: str, database: Path) -> Outcome:
    """Runs one statement, read-only and bounded; never raises on bad SQL."""
    verbs = statement_verbs(sql)
    is_safe = not any(verb in WRITE_VERBS for verb in verbs)
    if not is_safe or len(verbs) != 1 or verbs[0] not in READ_VERBS:
        return Outcome(None, is_safe, f"not one reading statement (verbs {verbs})")
    denied: list[int] = []
    connection = sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        _bound(connection)

        def authorize(action: int, *_: str | None) -> int:
            if action in READS:
                return sqlite3.SQLITE_OK
            denied.append(action)
            return sqlite3.SQLITE_DENY

        connection.set_authorizer(authorize)
        rows = connection.execute(sql).fetchmany(MAX_ROWS + 1)
    # sqlite3 answers a lone surrogate or a NUL in the query with a ValueError.
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        return Outcome(None, not denied, str(error))
    finally:
        connection.close()
    if len(rows) > MAX_ROWS:
        return Outcome(None, True, f"more than {MAX_ROWS} rows")
    return Outcome(tuple(rows), True)


def _bound(connection: sqlite3.Connection) -> None:
    deadline_s = time.monotonic() + MAX_SECONDS
    num_checks = [0]

    def is_over() -> bool:
        num_checks[0] += 1
        return num_checks[0] * STEPS_PER_CHECK > MAX_STEPS or time.monotonic() > deadline_s

    connection.set_progress_handler(is_over, STEPS_PER_CHECK)


def statement_verbs(sql: str) -> list[str]:
    """The first word of each statement, lower case; quoted text and comments do not count."""
    bare = re.sub(
        r"'(?:[^']|'')*'|\"[^\"]*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|\Z)", " _ ", sql, flags=re.DOTALL
    )
    words = (re.search(r"[A-Za-z]+", re.sub(r"\b_\b", " ", part)) for part in bare.split(";"))
    return [word.group().lower() for word in words if word]


def is_ordered(sql: str) -> bool:
    """Whether the outermost query orders its rows: an ORDER BY outside quotes and brackets."""
    bare = re.sub(r"'(?:[^']|'')*'|\"[^\"]*\"", " ", sql)
    while (inner := re.sub(r"\([^()]*\)", " ", bare)) != bare:
        bare = inner
    return re.search(r"\border\s+by\b", bare, flags=re.IGNORECASE) is not None


def same_rows(got: Sequence[Row], wanted: Sequence[Row], ordered: bool) -> bool:
    """Whether two results are equal: as lists if `ordered`, else as multisets; numbers to a relative 1e-6."""
    if len(got) != len(wanted):
        return False
    if not ordered:
        got, wanted = sorted(got, key=_sort_key), sorted(wanted, key=_sort_key)
    return all(
        len(a) == len(b) and all(_same_value(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(got, wanted, strict=True)
    )


def _same_value(a: object, b: object) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-9)
    return type(a) is type(b) and a == b


def _sort_key(row: Row) -> tuple[list[tuple[int, float, str]], list[float]]:
    """Numbers by six digits first, so that results equal within the tolerance sort alike, then exactly."""
    coarse, exact = [], []
    for value in row:
        is_number = isinstance(value, int | float)
        coarse.append((1, float(f"{value:.6g}"), "") if is_number else (0 if value is None else 2, 0.0, repr(value)))
        exact.append(float(value) if is_number else 0.0)
    return coarse, exact
