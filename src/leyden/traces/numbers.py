"""Numbers of a call that are given while its row is written, where several gateways serve one attempt.

The place in the order of arrival and the occurrence of a request are each the next free number in the store's own
transaction, so the numbers of an attempt have no gaps and no two calls share one, whichever process writes. One gateway
alone counts for itself (`gateway.ledger`), which costs no look at the table.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select

from leyden.store.prepared import Prepared
from leyden.store.schema import attempts, calls
from leyden.traces.rows import json_text

Numbers = tuple[int, int]
"""Place in the order of arrival, and occurrence."""
Sampling = Callable[[int], Mapping[str, Any]]
"""Place in the order of arrival -> sampling parameters, since a seed follows from the place."""

# Prepared, because the transaction keeps every other writer waiting.
_MINE = calls.c.attempt_id == bindparam("of_attempt")
_NEXT = Prepared(
    select(
        select(func.coalesce(func.max(calls.c.seq) + 1, 0)).where(_MINE).scalar_subquery(),
        select(func.coalesce(func.max(calls.c.occurrence) + 1, 0))
        .where(_MINE, calls.c.digest == bindparam("of_digest"))
        .scalar_subquery(),
    )
)
_LOCK = Prepared(
    select(attempts.c.attempt_id).where(attempts.c.attempt_id == bindparam("of_attempt")).with_for_update()
)
_INSERT = Prepared(insert(calls))


def insert_numbered(connection: Connection, row: Mapping[str, Any], sampling: Sampling) -> Numbers:
    """Insert the row of a call of an attempt, which has every column, with the next free numbers."""
    mine = {"of_attempt": row["attempt_id"]}
    if connection.dialect.name != "sqlite":
        # Elsewhere two transactions may read one maximum; whoever holds the attempt's row counts alone.
        _LOCK.run(connection, mine)
    free = _NEXT.run(connection, {**mine, "of_digest": row["digest"]})
    assert free is not None
    seq, occurrence = free
    text = json_text(sampling(seq), f"the sampling parameters of call {row['call_id']}")
    _INSERT.run(connection, {**row, "seq": seq, "occurrence": occurrence, "sampling": text})
    return seq, occurrence
