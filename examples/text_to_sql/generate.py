"""Writes seeded text-to-SQL tasks: `tasks/{train,val,holdout,demos}.jsonl` and `databases/*.sqlite` under
--out.

Promises: the same arguments give the same bytes (under one SQLite version); no question in two splits;
holdout schemas are seen nowhere else; each reference result is neither empty nor NULL nor zero and differs
between the task's two databases, so no constant can be right; near misses (the filter dropped, the order
reversed) are wrong on one of them. Does not ask for a model and does not score anything.
"""

import argparse
import json
import random
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import build_messages
from schemas import SCHEMAS, Number, Schema, Table
from shapes import SHAPES, Draft, Picker, Shape
from verify import run_query

from leyden.rewards.library.sql_rows import is_ordered, same_rows

NUM_PAIRS = 4  # database pairs per schema: enough that the questions of one schema do not share one set of rows
MAX_DRAFTS = 400  # per task; a shape that fails this often has no question left in that schema
NUM_ROWS = (11, 15)  # child tables
NUM_PARENT_ROWS = (5, 8)
NULL_SHARE = 0.25


@dataclass(frozen=True)
class Pair:
    schema: Schema
    """What both databases hold."""
    paths: tuple[Path, Path]
    """The database that the agent runs on, and the hidden one."""

    def names(self) -> tuple[str, str]:
        """Paths as they stand in the task files."""
        return (f"databases/{self.paths[0].name}", f"databases/{self.paths[1].name}")


def schema_text(schema: Schema) -> str:
    """CREATE TABLE statements, one a line."""
    return "\n".join(create_table(schema, table) for table in schema.tables)


def create_table(schema: Schema, table: Table) -> str:
    """The compact CREATE TABLE statement of one table."""
    columns = [f"{name} {kind}" for name, kind in column_kinds(schema, table)]
    return f"CREATE TABLE {table.name} ({', '.join(columns)});"


def column_kinds(schema: Schema, table: Table) -> list[tuple[str, str]]:
    """(column, type) of a table in order: label, reference to the parent, categories, numbers."""
    texts = [table.label]
    if table.parent:
        texts.append(next(t.label for t in schema.tables if t.name == table.parent))
    texts += table.categories
    return [(name, "TEXT") for name in texts] + [(name, "INT") for name in [*table.numbers, *table.optional]]


def build_rows(rng: random.Random, schema: Schema, sizes: dict[str, int]) -> dict[str, list[tuple[Any, ...]]]:
    """Random rows for every table, `sizes[table]` of them, parents without children included."""
    labels = {t.name: rng.sample(t.labels.split(","), sizes[t.name]) for t in schema.tables}
    rows: dict[str, list[tuple[Any, ...]]] = {}
    for table in schema.tables:
        size = sizes[table.name]
        columns: list[list[Any]] = [list(labels[table.name])]
        if table.parent:
            used = labels[table.parent][: -rng.randint(1, 2)]
            columns.append(rng.choices(used, k=size))
        for values in table.categories.values():
            pool = values.split(",")
            used = rng.sample(pool, rng.randint(min(3, len(pool)), len(pool)))
            columns.append(rng.choices(used, k=size))
        columns += [rng.sample(_grid(span), size) for span in table.numbers.values()]
        for span in table.optional.values():
            filled: list[int | None] = list(rng.sample(_grid(span), size))
            columns.append([None if rng.random() < NULL_SHARE else value for value in filled])
        rows[table.name] = list(zip(*columns, strict=True))
    return rows


def _grid(span: Number) -> range:
    return range(span.low, span.high + 1, span.step)


def write_database(path: Path, schema: Schema, rows: dict[str, list[tuple[Any, ...]]]) -> None:
    """One SQLite file with the given rows, replacing what was there."""
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        # Generated again in seconds, so nothing is gained by waiting for the disk.
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("BEGIN")
        for table in schema.tables:
            connection.execute(create_table(schema, table))
            marks = ", ".join("?" * len(rows[table.name][0]))
            connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows[table.name])
        connection.execute("COMMIT")
    finally:
        connection.close()


def write_pair(seed: int, schema: Schema, number: int, folder: Path) -> Pair:
    """Two databases of one schema; no table has the same size in both."""
    rng = random.Random(f"{seed}/{schema.name}/{number}")
    sizes: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for table in schema.tables:
        low, high = NUM_ROWS if table.parent else NUM_PARENT_ROWS
        both = rng.sample(range(low, min(high, len(table.labels.split(","))) + 1), 2)
        sizes[0][table.name], sizes[1][table.name] = both
    paths = (folder / f"{schema.name}-{number}a.sqlite", folder / f"{schema.name}-{number}b.sqlite")
    for path, size in zip(paths, sizes, strict=True):
        write_database(path, schema, build_rows(rng, schema, size))
    return Pair(schema, paths)


def is_good(draft: Draft, pair: Pair) -> bool:
    """Whether the reference result is worth asking for; see the module docstring."""
    results = []
    for path in pair.paths:
        outcome = run_query(draft.sql, path)
        assert outcome.rows is not None, f"reference SQL fails: {draft.sql}: {outcome.error}"
        if not any(value for row in outcome.rows for value in row):
            return False
        if draft.tie_check:
            counts = run_query(draft.tie_check, path).rows
            assert counts is not None, f"tie check fails: {draft.tie_check}"
            if len(counts) < 2 or counts[0][-1] == counts[1][-1]:
                return False
        results.append(outcome.rows)
    if same_rows(results[0], results[1], ordered=False):
        return False
    return all(_is_wrong(foil, pair, results, is_ordered(draft.sql)) for foil in draft.foils)


def _is_wrong(sql: str, pair: Pair, results: list[tuple[tuple[Any, ...], ...]], ordered: bool) -> bool:
    for path, wanted in zip(pair.paths, results, strict=True):
        got = run_query(sql, path).rows
        assert got is not None, f"near miss fails: {sql}"
        if not same_rows(got, wanted, ordered):
            return True
    return False


def shapes_for(rng: random.Random, count: int) -> list[Shape]:
    """`count` shapes in the proportion of their weights (largest remainder), shuffled."""
    shares = [shape.weight * count / 100 for shape in SHAPES]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(SHAPES)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_remainder[: count - sum(counts)]:
        counts[i] += 1
    chosen = [shape for shape, n in zip(SHAPES, counts, strict=True) for _ in range(n)]
    rng.shuffle(chosen)
    return chosen


def make_tasks(
    seed: int, name: str, count: int, pairs: list[list[Pair]], asked: set[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """`count` tasks of one split; questions in `asked` (schema, question) are not used again.

    Raises ValueError when the schemas have no questions left.
    """
    rng = random.Random(f"{seed}/{name}")
    split = "train" if name == "demos" else name
    for index, shape in enumerate(shapes_for(rng, count)):
        order = pairs[index % len(pairs) :] + pairs[: index % len(pairs)]
        for of_schema in order:  # the next schema takes over where one has no question of this shape left
            made = _new_question(rng, shape, of_schema, asked)
            if made is not None:
                break
        else:
            raise ValueError(f"no {shape.name} question left for {name} after {index} of {count}: ask for fewer tasks")
        draft, pair = made
        yield {
            "id": f"{name}-{index:04d}",
            "split": split,
            "domain": pair.schema.name,
            "input": {
                "question": draft.question,
                "schema": schema_text(pair.schema),
                "database": pair.names()[0],
            },
            "answer": {
                "sql": draft.sql,
                "databases": list(pair.names()),
                "shape": shape.name,
                "difficulty": shape.difficulty,
            },
            "purpose": "train" if split == "train" else "evaluation",
        }


def _new_question(
    rng: random.Random, shape: Shape, pairs: list[Pair], asked: set[tuple[str, str]]
) -> tuple[Draft, Pair] | None:
    for _ in range(MAX_DRAFTS):
        pair = rng.choice(pairs)
        draft = shape.draft(Picker(rng, pair.schema))
        key = (pair.schema.name, draft.question)
        if key not in asked and is_good(draft, pair):
            asked.add(key)
            return draft, pair
    return None


def as_demo(task: dict[str, Any], answer: str) -> dict[str, Any]:
    """A demonstration: the task, and the conversation of the harness with a model that says `answer`."""
    messages = build_messages(task["input"]["schema"], task["input"]["question"])
    return {"task": task, "messages": [*messages, {"role": "assistant", "content": answer}]}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """JSON Lines, keys in the order given."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8", newline="\n")


def generate(out: Path, seed: int, counts: dict[str, int]) -> dict[str, list[dict[str, Any]]]:
    """Writes everything under `out`; `counts` maps train, val, holdout and demos to a number of tasks."""
    (out / "databases").mkdir(parents=True, exist_ok=True)
    (out / "tasks").mkdir(exist_ok=True)
    pairs = [[write_pair(seed, schema, k, out / "databases") for k in range(NUM_PAIRS)] for schema in SCHEMAS]
    train_pairs = [of_schema for of_schema in pairs if not of_schema[0].schema.is_holdout]
    holdout_pairs = [of_schema for of_schema in pairs if of_schema[0].schema.is_holdout]
    asked: set[tuple[str, str]] = set()
    tasks = {}
    # Demonstrations first: their questions must not depend on how many training tasks are asked for.
    for name in ("demos", "val", "holdout", "train"):
        source = holdout_pairs if name == "holdout" else train_pairs
        tasks[name] = list(make_tasks(seed, name, counts[name], source, asked))
        records = [as_demo(task, task["answer"]["sql"]) for task in tasks[name]] if name == "demos" else tasks[name]
        write_lines(out / "tasks" / f"{name}.jsonl", records)
    questions = [(task["domain"], task["input"]["question"]) for split in tasks.values() for task in split]
    assert len(questions) == len(set(questions)), "a question occurs twice"
    return tasks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Generate text-to-SQL tasks and their databases.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "data", help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same files")
    for name, count in (("train", 1200), ("val", 100), ("holdout", 400), ("demos", 64)):
        parser.add_argument(f"--{name}", type=int, default=count, help=f"number of {name} tasks (default {count})")
    args = parser.parse_args(arguments)
    counts = {name: getattr(args, name) for name in ("train", "val", "holdout", "demos")}
    tasks = generate(args.out, args.seed, counts)
    print(json.dumps({"out": str(args.out), "seed": args.seed, **{name: len(made) for name, made in tasks.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
