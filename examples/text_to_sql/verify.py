"""Scores the query in `answer.sql` by running it on the task's databases.

Promises: only reading is ever executed (read-only file, authorizer), every query is bounded in steps,
seconds, rows and value size, and no answer of an agent, however bad, raises. Raises `BrokenTaskError` when
the task itself is at fault: a missing database, or reference SQL that does not run.

Components: `correct` (rows equal those of the reference on every database, and nothing but reading was
attempted), `executes` (runs on the first database), `safe` (nothing but reading was attempted), `tokens`
(completion tokens). Row order counts only where the reference orders; column names never count. Shapes:
none.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from leyden.rewards.library.sql_rows import is_ordered, run_reading, same_rows

ANSWER_FILE = "answer.sql"
MAX_ANSWER_BYTES = 4_000

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
    ran = run_reading(sql, database)
    return Outcome(ran.rows, ran.read_only, ran.error)


def statement_verbs(sql: str) -> list[str]:
    """The first word of each statement, lower case; quoted text and comments do not count."""
    bare = re.sub(
        r"'(?:[^']|'')*'|\"[^\"]*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|\Z)", " _ ", sql, flags=re.DOTALL
    )
    words = (re.search(r"[A-Za-z]+", re.sub(r"\b_\b", " ", part)) for part in bare.split(";"))
    return [word.group().lower() for word in words if word]
