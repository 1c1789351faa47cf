"""Turns a folder with GeoQuery (text2sql-data format) into task files and databases under --out.

Reads `geography.json` and `geography-db.sqlite`. Writes `tasks/{train,val,holdout,demos}.jsonl`,
`databases/geography{,-renamed}.sqlite` and `import_report.json`, which is also the last line of the output.
Only one database is published, so a second one is made from it: names are permuted within their domain
(states, cities, rivers, mountains, lakes) in every column alike, a few states are taken out with all their
rows, and each quantity (people, area, length, height) is multiplied by its own factor. That keeps every
dependency and order between columns, so a query that is right stays right, while a constant and an answer by
heart do not. Nothing is dropped in silence: reference queries that do not run are
named and left out, and questions with an empty result are counted and kept.
"""

import argparse
import json
import random
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generate import as_demo, write_lines
from verify import Outcome, run_query

from leyden.rewards.library.sql_rows import is_ordered, same_rows

SPLITS = {"train": "train", "dev": "val", "test": "holdout"}
NUM_CANDIDATES = 12  # renamed copies tried; more change the count of unmoved results by a handful only
NUM_STATES_OUT = 6
MORE_PEOPLE, MORE_AREA, MORE_LENGTH, MORE_HEIGHT = 1.25, 1.5, 1.75, 2.0  # above 1: rounding makes no new ties

# Every column that holds a name of the domain; `highest_point` names mountains, `capital` names cities.
DOMAINS: dict[str, tuple[tuple[str, str], ...]] = {
    "state": (
        ("state", "state_name"),
        ("border_info", "state_name"),
        ("border_info", "border"),
        ("city", "state_name"),
        ("highlow", "state_name"),
        ("lake", "state_name"),
        ("mountain", "state_name"),
        ("river", "traverse"),
    ),
    "city": (("city", "city_name"), ("state", "capital")),
    "river": (("river", "river_name"),),
    "mountain": (("mountain", "mountain_name"), ("highlow", "highest_point")),
    "lake": (("lake", "lake_name"),),
}

# Columns of numbers and what each is multiplied by; density is people per area, elevations are text.
FACTORS: dict[tuple[str, str], float] = {
    ("state", "population"): MORE_PEOPLE,
    ("city", "population"): MORE_PEOPLE,
    ("state", "area"): MORE_AREA,
    ("lake", "area"): MORE_AREA,
    ("state", "density"): MORE_PEOPLE / MORE_AREA,
    ("river", "length"): MORE_LENGTH,
    ("mountain", "mountain_altitude"): MORE_HEIGHT,
    ("highlow", "highest_elevation"): MORE_HEIGHT,
    ("highlow", "lowest_elevation"): MORE_HEIGHT,
}


@dataclass(frozen=True)
class Question:
    text: str
    """The question with its variables filled in."""
    sql: str
    """First reference query, filled in."""
    split: str
    """train, val or holdout."""
    entry: int
    """Number of the query template in the file, from 0."""


def read_questions(path: Path, split_key: str) -> Iterator[Question]:
    """All questions of `geography.json`; `split_key` is "question-split" or "query-split"."""
    for number, entry in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        for sentence in entry["sentences"]:
            split = sentence[split_key] if split_key == "question-split" else entry[split_key]
            if split not in SPLITS:
                raise ValueError(f"{path}: {split_key} {split!r} in entry {number}, expected {', '.join(SPLITS)}")
            fill = filler(sentence["variables"])
            yield Question(fill(sentence["text"]), fill(entry["sql"][0]), SPLITS[split], number)


def filler(variables: dict[str, str]) -> Callable[[str], str]:
    """A function that puts values in the place of variable names, all at once."""
    if not variables:
        return str
    # Longest first, so that name1 does not eat the beginning of name10.
    pattern = re.compile("|".join(re.escape(name) for name in sorted(variables, key=len, reverse=True)))
    return lambda text: pattern.sub(lambda found: variables[found.group()], text)


def schema_text(database: Path) -> str:
    """One `table(columns)` a line: types and CREATE TABLE would add over 40 tokens to each prompt."""
    with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        tables = [
            str(name)
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid")
        ]
        lines = []
        for table in tables:
            columns = [str(row[1]) for row in connection.execute(f"PRAGMA table_info({table})")]
            lines.append(f"{table}({', '.join(columns)})")
    return "\n".join(lines)


def write_renamed(source: Path, target: Path, rng: random.Random) -> None:
    """A copy with permuted names and `NUM_STATES_OUT` states less; see the module docstring."""
    shutil.copyfile(source, target)
    with closing(sqlite3.connect(target, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA journal_mode = MEMORY")
        connection.execute("BEGIN")
        states = sorted(name for (name,) in connection.execute("SELECT state_name FROM state"))
        gone = rng.sample(states, min(NUM_STATES_OUT, len(states) - 1))
        marks = ", ".join("?" * len(gone))
        for table, column in DOMAINS["state"]:
            connection.execute(f"DELETE FROM {table} WHERE {column} IN ({marks})", gone)
        for columns in DOMAINS.values():
            _permute(connection, columns, rng)
        for (table, column), factor in FACTORS.items():
            _multiply(connection, table, column, factor)
        connection.execute("COMMIT")
        connection.execute("VACUUM")


def _permute(connection: sqlite3.Connection, columns: tuple[tuple[str, str], ...], rng: random.Random) -> None:
    names: set[str] = set()
    for table, column in columns:
        names |= {n for (n,) in connection.execute(f"SELECT {column} FROM {table}") if n is not None}
    old = sorted(names)
    new = rng.sample(old, len(old))
    connection.execute("CREATE TEMP TABLE renaming (old TEXT PRIMARY KEY, new TEXT)")
    connection.executemany("INSERT INTO renaming VALUES (?, ?)", zip(old, new, strict=True))
    for table, column in columns:
        lookup = f"SELECT new FROM renaming WHERE old = {table}.{column}"
        connection.execute(f"UPDATE {table} SET {column} = ({lookup}) WHERE {column} IS NOT NULL")
    connection.execute("DROP TABLE renaming")


def _multiply(connection: sqlite3.Connection, table: str, column: str, factor: float) -> None:
    """Every value of a column times `factor`, in the type that it had."""
    rows = connection.execute(f"SELECT rowid, {column} FROM {table} WHERE {column} IS NOT NULL").fetchall()
    for rowid, value in rows:
        product = value * factor if isinstance(value, float) else round(int(value) * factor)
        new = str(product) if isinstance(value, str) else product
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (new, rowid))


def choose_renamed(source: Path, target: Path, sqls: list[str], seed: int) -> None:
    """Writes to `target` the candidate with the fewest reference results that are unmoved or newly empty."""
    wanted = {sql: run_query(sql, source) for sql in sqls}
    best: tuple[int, int] | None = None
    for number in range(NUM_CANDIDATES):
        write_renamed(source, target, random.Random(f"{seed}/{number}"))
        score = sum(_is_weak(wanted[sql], run_query(sql, target)) for sql in sqls), number
        best = score if best is None else min(best, score)
    assert best is not None
    write_renamed(source, target, random.Random(f"{seed}/{best[1]}"))


def _is_weak(first: Outcome, second: Outcome) -> bool:
    if first.rows is None or is_empty(first):
        return False  # no copy can help these
    return second.rows is None or is_empty(second) or same_rows(first.rows, second.rows, ordered=False)


def is_empty(outcome: Outcome) -> bool:
    """Whether a result has no row, or only NULLs."""
    return outcome.rows is not None and all(value is None for row in outcome.rows for value in row)


def compact_sql(sql: str, databases: list[Path]) -> str:
    """A shorter query with the same results on all databases, for demonstrations only.

    The first of three spellings whose result agrees: bare columns, columns with table names, short aliases.
    The first two could change the meaning of a query with several aliases, so there a result that is empty on
    every database, which agrees with many, does not count for them.
    """
    plain = re.sub(r'"([^"\']*)"', r"'\1'", sql.rstrip(" ;"))
    plain = re.sub(r"DERIVED_(TABLE|FIELD)alias(\d+)", lambda m: f"{m[1][0].lower()}{m[2]}", plain)
    bare = re.sub(r"(\w+) AS \1alias\d+", lambda m: m[1].lower(), plain)
    spellings = [
        re.sub(r"\w+alias\d+\.(\w+)", lambda m: m[1].lower(), bare),
        re.sub(r"(\w+)alias\d+\.(\w+)", lambda m: f"{m[1].lower()}.{m[2].lower()}", bare),
        re.sub(r"(?:\w+ AS )?\w+alias\d+(?:\.\w+)?", lambda m: _shorter(m[0]), plain),
    ]
    wanted = [run_query(sql, database) for database in databases]
    is_telling = len(set(re.findall(r"\w+alias\d+", plain))) < 2 or not all(map(is_empty, wanted))
    for spelling in spellings if is_telling else spellings[2:]:
        short = re.sub(r"\(\s+", "(", re.sub(r"\s+([),])", r"\1", " ".join(spelling.split())))
        got = [run_query(short, database).rows for database in databases]
        pairs = zip(got, (outcome.rows for outcome in wanted), strict=True)
        if all(a is not None and b is not None and same_rows(a, b, is_ordered(sql)) for a, b in pairs):
            return short
    return sql.rstrip(" ;")


def _shorter(text: str) -> str:
    return text.lower().replace(" as ", " AS ").replace("alias", "")


def main_table(sql: str) -> str:
    """The first table that a query reads, lower case: coarse enough to be a task's `domain`."""
    found = re.search(r"\bFROM\s+(\w+)", sql)
    return found.group(1).lower() if found else "none"


def as_task(question: Question, number: int, schema: str, databases: list[Path]) -> dict[str, Any]:
    """One line of a task file."""
    names = [f"databases/{path.name}" for path in databases]
    return {
        "id": f"geoquery-{number:04d}",
        "split": question.split,
        "domain": main_table(question.sql),
        "input": {"question": question.text, "schema": schema, "database": names[0]},
        "answer": {"sql": question.sql, "databases": names, "template": question.entry},
        "purpose": "train" if question.split == "train" else "evaluation",
    }


def import_folder(source: Path, out: Path, split_key: str, sft_share: float, seed: int) -> dict[str, Any]:
    """Writes everything and returns the report; raises ValueError for a bad share or an unknown split."""
    if not 0.0 <= sft_share <= 1.0:
        raise ValueError(f"--sft-share {sft_share}: must lie between 0 and 1")
    (out / "databases").mkdir(parents=True, exist_ok=True)
    (out / "tasks").mkdir(exist_ok=True)
    questions = list(read_questions(source / "geography.json", split_key))
    databases = [out / "databases" / f"geography{suffix}.sqlite" for suffix in ("", "-renamed")]
    shutil.copyfile(source / "geography-db.sqlite", databases[0])
    first = {sql: run_query(sql, databases[0]) for sql in sorted({q.sql for q in questions})}
    choose_renamed(databases[0], databases[1], [sql for sql in first if first[sql].rows is not None], seed)
    second = {sql: run_query(sql, databases[1]) for sql in first}
    schema = schema_text(databases[0])
    tasks: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS.values()}
    failed = []
    for number, question in enumerate(questions):
        error = next((o.error for o in (first[question.sql], second[question.sql]) if o.rows is None), None)
        if error is not None:
            failed.append({"question": question.text, "split": question.split, "error": error, "sql": question.sql})
            continue
        tasks[question.split].append(as_task(question, number, schema, databases))
    demos, tasks["train"] = _divide(tasks["train"], sft_share, seed)
    for split, made in tasks.items():
        write_lines(out / "tasks" / f"{split}.jsonl", made)
    short = {t["answer"]["sql"]: compact_sql(t["answer"]["sql"], databases) for t in demos}
    write_lines(out / "tasks" / "demos.jsonl", [as_demo(t, short[t["answer"]["sql"]]) for t in demos])
    kept = [q for q in questions if first[q.sql].rows is not None and second[q.sql].rows is not None]
    report = {
        "split": split_key,
        "num_questions": len(questions),
        "num_per_split": {**{split: len(made) for split, made in tasks.items()}, "demos": len(demos)},
        "num_published_holdout": sum(q.split == "holdout" for q in questions),
        "num_empty_result": sum(is_empty(first[q.sql]) for q in kept),
        "num_empty_on_renamed": sum(is_empty(second[q.sql]) for q in kept),
        "num_same_on_both": sum(
            not is_empty(first[q.sql]) and same_rows(first[q.sql].rows or (), second[q.sql].rows or (), False)
            for q in kept
        ),
        "num_questions_in_two_splits": num_in_two_splits(questions),
        "num_excluded": len(failed),
        "excluded": failed,
    }
    (out / "import_report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def num_in_two_splits(questions: list[Question]) -> int:
    """How many different question texts stand in more than one split, as published."""
    splits: dict[str, set[str]] = {}
    for question in questions:
        splits.setdefault(question.text, set()).add(question.split)
    return sum(len(found) > 1 for found in splits.values())


def _divide(tasks: list[dict[str, Any]], share: float, seed: int) -> tuple[list[Any], list[Any]]:
    """A random `share` of the tasks, and the rest, both in their old order."""
    chosen = set(random.Random(f"{seed}/sft").sample(range(len(tasks)), round(share * len(tasks))))
    return [t for i, t in enumerate(tasks) if i in chosen], [t for i, t in enumerate(tasks) if i not in chosen]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Import GeoQuery as text-to-SQL tasks.")
    parser.add_argument("path", type=Path, help="folder with geography.json and geography-db.sqlite")
    default_out = Path(__file__).resolve().parent / "data" / "geoquery"
    parser.add_argument("--out", type=Path, default=default_out, help="folder to write")
    parser.add_argument("--split", choices=("question", "query"), default="question", help="published split to use")
    parser.add_argument("--sft-share", type=float, default=0.5, help="share of train written to demos.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="seed of that share and of the renamed database")
    args = parser.parse_args(arguments)
    report = import_folder(args.path, args.out, f"{args.split}-split", args.sft_share, args.seed)
    for item in report["excluded"]:
        print(f"excluded ({item['split']}): {item['question']}: {item['error']}: {item['sql']}", file=sys.stderr)
    print(json.dumps({key: value for key, value in report.items() if key != "excluded"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
