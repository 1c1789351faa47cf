"""Looking at rollouts: by id, state, step, order of end, group. Part of the queue; import it from there."""

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Select, func, select

from leyden.base.errors import NotFound
from leyden.base.records import Rollout, RolloutState
from leyden.store.columns import chunks, rollout_of
from leyden.store.schema import rollouts as table


def get(conn: Connection, rollout_id: str) -> Rollout:
    """One rollout. NotFound."""
    return rollout_of(row_of(conn, rollout_id))


def get_many(conn: Connection, ids: Sequence[str]) -> list[Rollout]:
    """Rollouts in the order of `ids`. NotFound, with the first few that are missing."""
    known = existing(conn, ids)
    missing = [rollout_id for rollout_id in ids if rollout_id not in known]
    if missing:
        raise NotFound(f"{len(missing)} of {len(ids)} rollouts are not in the store, for example {missing[:3]}")
    return [known[rollout_id] for rollout_id in ids]


def select_by_state(
    conn: Connection, states: Collection[RolloutState], limit: int, run_id: str | None = None
) -> list[Rollout]:
    """Up to `limit` rollouts in any of `states`, in order of insertion."""
    query = select(table).where(table.c.state.in_([RolloutState(state).value for state in states]))
    if run_id is not None:
        query = query.where(table.c.run_id == run_id)
    return _rollouts(conn, query.order_by(table.c.created_seq).limit(limit))


def select_by_step(conn: Connection, run_id: str, step: int) -> list[Rollout]:
    """The rollouts of one step of a run, in order of insertion."""
    query = select(table).where(table.c.run_id == run_id, table.c.step == step)
    return _rollouts(conn, query.order_by(table.c.created_seq))


def count_by_state(conn: Connection, run_id: str | None = None, step: int | None = None) -> dict[RolloutState, int]:
    """Number of rollouts in every state, zeros included."""
    query = select(table.c.state, func.count()).group_by(table.c.state)
    if run_id is not None:
        query = query.where(table.c.run_id == run_id)
    if step is not None:
        query = query.where(table.c.step == step)
    counts = dict.fromkeys(RolloutState, 0)
    counts.update({RolloutState(state): count for state, count in conn.execute(query)})
    return counts


def terminal(conn: Connection, after: int, limit: int, run_id: str | None = None) -> tuple[list[Rollout], int, int]:
    """Rollouts that ended after cursor `after`, in order of their end; the next cursor; how many have ended
    in all."""
    mine = table.c.finished_seq.is_not(None) if run_id is None else table.c.run_id == run_id
    query = select(table).where(table.c.finished_seq > after, mine).order_by(table.c.finished_seq).limit(limit)
    found = _rollouts(conn, query)
    total = conn.execute(
        select(func.count()).select_from(table).where(mine, table.c.finished_seq.is_not(None))
    ).scalar_one()
    next_after = found[-1].finished_seq if found else after
    assert next_after is not None
    return found, next_after, total


def finished_groups(conn: Connection, run_id: str | None = None, mode: str | None = None) -> list[list[str]]:
    """Ids of rollouts by group, groups of which every rollout is over, oldest first; without a group, one of
    its own."""
    columns = (table.c.rollout_id, table.c.group_id, table.c.finished_seq)
    query = select(*columns).order_by(table.c.created_seq)
    if run_id is not None:
        query = query.where(table.c.run_id == run_id)
    if mode is not None:
        query = query.where(table.c.mode == mode)
    groups: dict[tuple[str, str], list[str]] = {}
    unfinished: set[tuple[str, str]] = set()
    for row in conn.execute(query):
        key = ("rollout", row.rollout_id) if row.group_id is None else ("group", row.group_id)
        groups.setdefault(key, []).append(row.rollout_id)
        if row.finished_seq is None:
            unfinished.add(key)
    return [ids for key, ids in groups.items() if key not in unfinished]


def existing(conn: Connection, ids: Sequence[str]) -> dict[str, Rollout]:
    """Those of `ids` that are in the store, by id."""
    found: dict[str, Rollout] = {}
    for piece in chunks(ids):
        for rollout in _rollouts(conn, select(table).where(table.c.rollout_id.in_(piece))):
            found[rollout.id] = rollout
    return found


def row_of(conn: Connection, rollout_id: str) -> Any:
    """The row of a rollout. NotFound."""
    row = conn.execute(select(table).where(table.c.rollout_id == rollout_id)).one_or_none()
    if row is None:
        raise NotFound(f"there is no rollout {rollout_id!r}; it may have been deleted")
    return row


def _rollouts(conn: Connection, query: Select[Any]) -> list[Rollout]:
    return [rollout_of(row) for row in conn.execute(query)]
