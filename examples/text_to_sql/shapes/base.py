"""What a question shape is, and the random picks that all of them share."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from schemas import Number, Schema, Table

# Words of a question and the SQL function that they mean.
AGGREGATES = (("highest", "MAX"), ("lowest", "MIN"), ("average", "AVG"), ("total", "SUM"))


@dataclass(frozen=True)
class Draft:
    question: str
    """Natural-language question."""
    sql: str
    """Reference query."""
    foils: tuple[str, ...] = ()
    """Near misses that must give another result on at least one database."""
    tie_check: str = ""
    """Query whose first two rows must differ in their last column, else "the most" has no single answer."""


@dataclass(frozen=True)
class Shape:
    name: str
    """Shape, written to the task's answer."""
    difficulty: str
    """easy, medium or hard."""
    weight: int
    """Share of the tasks; all weights add up to 100."""
    draft: Callable[["Picker"], Draft] = field(repr=False)
    """Makes one question."""


class Picker:
    """Random picks from one schema; the same seed gives the same picks."""

    def __init__(self, rng: random.Random, schema: Schema) -> None:
        self.rng = rng
        self.schema = schema

    def say(self, *templates: str, **words: object) -> str:
        """One of the paraphrases, filled in."""
        return self.rng.choice(templates).format(**words)

    def table(self) -> Table:
        """Any table; a child table twice as often, since it has more columns."""
        return self.rng.choice([t for t in self.schema.tables for _ in range(2 if t.parent else 1)])

    def family(self) -> tuple[Table, Table]:
        """A child table and its parent."""
        child = self.rng.choice([t for t in self.schema.tables if t.parent])
        parent = next(t for t in self.schema.tables if t.name == child.parent)
        return child, parent

    def category(self, table: Table) -> tuple[str, str]:
        """A category column and one of its values."""
        column = self.rng.choice(sorted(table.categories))
        return column, self.rng.choice(table.categories[column].split(","))

    def number(self, table: Table) -> tuple[str, Number]:
        """A numeric column that is never NULL, and its range."""
        column = self.rng.choice(sorted(table.numbers))
        return column, table.numbers[column]

    def threshold(self, span: Number) -> int:
        """A value inside the range, on its grid."""
        num_steps = (span.high - span.low) // span.step
        return span.low + span.step * self.rng.randint(num_steps // 5, num_steps - num_steps // 5)


def compare(p: Picker) -> tuple[str, str]:
    """Words and operator of a comparison."""
    return p.rng.choice(
        [
            ("over", ">"),
            ("more than", ">"),
            ("above", ">"),
            ("under", "<"),
            ("less than", "<"),
            ("below", "<"),
        ]
    )
