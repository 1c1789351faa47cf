"""What an SQLite writer does in one transaction: rows to insert and functions to run, each with somebody who waits.

Knows how rows become statements; opens no file, begins no transaction.
"""

import sqlite3
from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import sqlite

from leyden.store import schema
from leyden.store.base import Receipt, Row

_ROWS = (64, 16, 4, 1)
"""Rows of one INSERT: few sizes, so that every statement stays compiled, and at most 1344 values."""


class Insert:
    """One table's INSERT, compiled once."""

    def __init__(self, table: Table, order: int) -> None:
        self.table = table
        self.order = order
        self.names = tuple(column.name for column in table.columns)
        self.pick = itemgetter(*self.names)
        one = str(table.insert().compile(dialect=sqlite.dialect(paramstyle="qmark")))
        head, _, values = one.partition(" VALUES ")
        self._sql = {num_rows: f"{head} VALUES {', '.join([values] * num_rows)}" for num_rows in _ROWS}

    def run(self, connection: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert `rows`."""
        start = 0
        for num_rows in _ROWS:
            while len(rows) - start >= num_rows:
                piece = rows[start : start + num_rows]
                values = piece[0] if num_rows == 1 else tuple(chain.from_iterable(piece))
                connection.execute(self._sql[num_rows], values)
                start += num_rows

    def tuples(self, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
        """Values in the order of the columns; a nullable column may be missing."""
        return [self._tuple(row) for row in rows]

    def _tuple(self, row: Row) -> tuple[Any, ...]:
        if len(row) == len(self.names):
            return tuple(self.pick(row))
        unknown = row.keys() - set(self.names)
        assert not unknown, f"table {self.table.name} has no columns {sorted(unknown)}"
        return tuple(row.get(name) for name in self.names)


class Append:
    """Rows to insert, all or none."""

    __slots__ = ("lazily", "parts", "receipt")

    def __init__(self, parts: list[tuple[Insert, list[tuple[Any, ...]]]], receipt: Receipt, lazily: bool) -> None:
        self.parts = parts
        self.receipt = receipt
        self.lazily = lazily

    def resolve(self, value: None, failure: BaseException | None) -> None:
        """Tell whoever waits."""
        self.receipt(failure)


class Job:
    """A function to run in a savepoint."""

    __slots__ = ("function", "lazily", "resolve")

    def __init__(
        self, function: Callable[[Connection], Any], resolve: Callable[[Any, BaseException | None], None], lazily: bool
    ) -> None:
        self.function = function
        self.resolve = resolve
        """Tells whoever waits: what the function returned, or why it did not."""
        self.lazily = lazily


Work = Append | Job
Result = tuple[Work, Any, BaseException | None]
INSERTS: dict[Table, Insert] = {
    table: Insert(table, order) for order, table in enumerate(schema.metadata.sorted_tables)
}
