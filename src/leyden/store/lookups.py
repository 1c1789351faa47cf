"""Ways to find rollouts for people: by the beginning of an id, by group, by age, by evaluation. Reads only."""

import json

from sqlalchemy import Connection, select

from leyden.base.errors import NotFound
from leyden.base.records import Rollout
from leyden.store.queue import get_many
from leyden.store.schema import rollouts as table


def find(connection: Connection, beginning: str) -> Rollout:
    """The one rollout whose id is `beginning` or begins with it. NotFound for none and for several."""
    escaped = beginning.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    query = select(table.c.rollout_id).where(table.c.rollout_id.like(f"{escaped}%", escape="\\")).limit(6)
    ids = list(connection.execute(query).scalars())
    if beginning in ids:
        ids = [beginning]
    if not ids:
        raise NotFound(f"no rollout {beginning!r}; `leyden inspect` without an id lists the newest")
    if len(ids) > 1:
        raise NotFound(f"{beginning!r} begins several ids ({', '.join(ids[:5])}, ...); give more of it")
    return get_many(connection, ids)[0]


def group(connection: Connection, group_id: str) -> list[str]:
    """Ids of the rollouts of a group, in order of creation."""
    query = select(table.c.rollout_id).where(table.c.group_id == group_id).order_by(table.c.created_seq)
    return list(connection.execute(query).scalars())


def newest_group(connection: Connection, run_id: str) -> list[str]:
    """Ids of the rollouts of the group that a run asked for last, in order of creation; [] if it has none."""
    query = (
        select(table.c.group_id)
        .where(table.c.run_id == run_id, table.c.group_id.is_not(None), table.c.mode == "train")
        .order_by(table.c.created_seq.desc())
        .limit(1)
    )
    found = connection.execute(query).scalar()
    return group(connection, found) if found else []


def newest(connection: Connection, limit: int) -> list[Rollout]:
    """The newest rollouts, newest first."""
    query = select(table.c.rollout_id).order_by(table.c.created_seq.desc()).limit(limit)
    return get_many(connection, list(connection.execute(query).scalars()))


def evaluation_ids(connection: Connection, run_id: str) -> dict[tuple[str, str], str]:
    """(label of the evaluation, task id) to the id of its first rollout, for the evaluations of a run."""
    query = (
        select(table.c.rollout_id, table.c.task_id, table.c.metadata)
        .where(table.c.run_id == run_id, table.c.mode == "val")
        .order_by(table.c.created_seq)
    )
    found: dict[tuple[str, str], str] = {}
    for rollout_id, task_id, metadata in connection.execute(query):
        label = json.loads(metadata).get("evaluation")
        if label:
            found.setdefault((label, task_id), rollout_id)
    return found


def evaluation_rollouts(connection: Connection, run_id: str, label: str) -> list[str]:
    """Ids of every rollout of the evaluation `label` of a run, in order of creation."""
    query = (
        select(table.c.rollout_id, table.c.metadata)
        .where(table.c.run_id == run_id, table.c.mode == "val")
        .order_by(table.c.created_seq)
    )
    return [row.rollout_id for row in connection.execute(query) if json.loads(row.metadata).get("evaluation") == label]
