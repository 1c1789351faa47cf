"""Numbers of a call that are given while its row is written, where several gateways serve one attempt.

The place in the order of arrival and the occurrence of a request are each the next free number in the store's own
transaction, so the numbers of an attempt have no gaps and no two calls share one, whichever process writes. One gateway
alone counts for itself (`gateway.ledger`), which costs no look at the table.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select

from leyden.store.columns import dump
from leyden.store.schema import attempts, calls

Sampling = Callable[[int], Mapping[str, Any]]
"""Place in the order of arrival -> sampling parameters, since a seed follows from the place."""

# Made once, so that they are compiled once: the transaction keeps every other writer waiting.
_MINE = calls.c.attempt_id == bindparam("of_attempt")
_NEXT = select(
    select(func.coalesce(func.max(calls.c.seq) + 1, 0)).where(_MINE).scalar_subquery(),
    select(func.coalesce(func.max(calls.c.occurrence) + 1, 0))
    .where(_MINE, calls.c.digest == bindparam("of_digest"))
    .scalar_subquery(),
)
_LOCK = select(attempts.c.attempt_id).where(attempts.c.attempt_id == bindparam("of_attempt")).with_for_update()
_INSERT = insert(calls)


def insert_numbered(connection: Connection, row: Mapping[str, Any], sampling: Sampling) -> tuple[int, int]:
    """Insert the row of a call of an attempt with the next free numbers: (place, occurrence)."""
    mine = {"of_attempt": row["attempt_id"]}
    if connection.dialect.name != "sqlite":
        # Elsewhere two transactions may read one maximum; whoever holds the attempt's row counts alone.
        connection.execute(_LOCK, mine)
    seq, occurrence = connection.execute(_NEXT, {**mine, "of_digest": row["digest"]}).one()
    text = dump(dict(sampling(seq)), f"the sampling parameters of call {row['call_id']}")
    connection.execute(_INSERT, {**row, "seq": seq, "occurrence": occurrence, "sampling": text})
    return seq, occurrence
