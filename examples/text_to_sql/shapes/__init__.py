"""Question shapes: each turns random picks from a schema into a question, its SQL and near misses.

Promises: one canonical SQL style per shape, and every table, column and value of the SQL stands in the
question. Whether a question is worth asking of given rows (not empty, not constant, no ties) is decided in
`generate.py`.
"""

from shapes import easy, hard, medium
from shapes.base import Draft, Picker, Shape

__all__ = ["SHAPES", "Draft", "Picker", "Shape"]

SHAPES = (
    Shape("count_all", "easy", 2, easy.count_all),
    Shape("count_category", "easy", 10, easy.count_category),
    Shape("count_number", "easy", 9, easy.count_number),
    Shape("list_category", "easy", 9, easy.list_category),
    Shape("list_number", "easy", 8, easy.list_number),
    Shape("lookup", "easy", 7, easy.lookup),
    Shape("aggregate", "easy", 5, easy.aggregate),
    Shape("aggregate_category", "medium", 6, medium.aggregate_category),
    Shape("top_one", "medium", 6, medium.top_one),
    Shape("top_k", "medium", 4, medium.top_k),
    Shape("sort_all", "medium", 2, medium.sort_all),
    Shape("group_count", "medium", 3, medium.group_count),
    Shape("distinct", "medium", 2, medium.distinct),
    Shape("count_distinct", "medium", 2, medium.count_distinct),
    Shape("negation", "medium", 5, medium.negation),
    Shape("missing", "medium", 4, medium.missing),
    Shape("two_conditions", "hard", 4, hard.two_conditions),
    Shape("join", "hard", 3, hard.join),
    Shape("join_lookup", "hard", 2, hard.join_lookup),
    Shape("without", "hard", 1, hard.without),
    Shape("most_common", "hard", 2, hard.most_common),
    Shape("group_aggregate", "hard", 2, hard.group_aggregate),
    Shape("having", "hard", 1, hard.having),
    Shape("above_average", "hard", 1, hard.above_average),
)
assert sum(shape.weight for shape in SHAPES) == 100
