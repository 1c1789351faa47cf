"""The queue of rollouts: made, leased, tried, finished. Functions over a connection, for `store.write` and
`store.read`.

Every change bumps topic `rollouts` (a heartbeat is none); ends and deletions bump `attempts` too. State
changes are compare-and-set: the same change twice is a no-op, another one is a Conflict. A holdout task never
gets in with mode `train`.
"""

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, and_, func, or_, select, update
from sqlalchemy import delete as sql_delete

from leyden.base.errors import Conflict, HoldoutError
from leyden.base.records import (
    ROLLOUT_TRANSITIONS,
    Outcome,
    Rollout,
    RolloutState,
    check_id,
    check_reward,
)
from leyden.store.attempts import (
    ATTEMPTS_TOPIC,
    TERMINAL,
    TOPIC,
    attempt_by_token,
    attempts,
    end_attempt,
    end_open_attempts,
    insert_attempt,
    start_attempt,
)
from leyden.store.base import Store
from leyden.store.columns import chunks, rollout_of, rollout_row
from leyden.store.schema import attempts as attempts_table
from leyden.store.schema import calls, choices, completions, control, rewards, spans
from leyden.store.schema import rollouts as table
from leyden.store.selections import (
    count_by_state,
    existing,
    finished_groups,
    get,
    get_many,
    row_of,
    select_by_state,
    select_by_step,
    terminal,
)

__all__ = [
    "ATTEMPTS_TOPIC",
    "TOPIC",
    "attempt_by_token",
    "attempts",
    "cancel_unfinished",
    "count_by_state",
    "delete",
    "end_attempt",
    "enqueue",
    "existing",
    "expire_leases",
    "finish",
    "finished_groups",
    "get",
    "get_many",
    "heartbeat",
    "lease",
    "patch_status",
    "release",
    "repin",
    "select_by_state",
    "select_by_step",
    "start_attempt",
    "terminal",
]

_FINISHED_KEY = "queue.finished_seq"
"""Row of `control` with the highest finished_seq of a deleted rollout: cursors must never see a number
twice."""
_UNFINISHED = (RolloutState.QUEUING.value, RolloutState.RUNNING.value)


def enqueue(conn: Connection, store: Store, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Queue rollouts, in order; one whose id exists is returned as it is in the store, unchanged.

    Raises HoldoutError for a holdout task with mode `train`, RecordError for an id or a field that cannot be
    stored; then none is queued.
    """
    for rollout in rollouts:
        check_id(rollout.id, "rollout id")
        if rollout.mode == "train" and rollout.task.split == "holdout":
            raise HoldoutError(
                f"rollout {rollout.id!r} would train on holdout task {rollout.task.id!r}; use mode 'val', "
                "or move the task to the train split and choose another holdout"
            )
    ids = [rollout.id for rollout in rollouts]
    known = existing(conn, ids)
    seq = conn.execute(select(func.coalesce(func.max(table.c.created_seq), 0))).scalar_one()
    rows: dict[str, dict[str, Any]] = {}
    for rollout in rollouts:
        if rollout.id not in known and rollout.id not in rows:
            seq += 1
            created_at = rollout.created_at or time.time()
            rows[rollout.id] = rollout_row(rollout, created_seq=seq, created_at=created_at)
    if rows:
        conn.execute(table.insert(), list(rows.values()))
        store.changed(conn, TOPIC)
        known.update(existing(conn, list(rows)))
    return [known[rollout_id] for rollout_id in ids]


def lease(
    conn: Connection,
    store: Store,
    owner: str,
    limit: int,
    lease_s: float,
    now: float,
    run_id: str | None = None,
) -> list[Rollout]:
    """Up to `limit` rollouts for `owner`, oldest first: queuing ones, released ones, and those of lost
    runners.

    `run_id` narrows it to one run. They are running afterwards. An attempt that a lost runner left open is
    ended as infra_error.
    """
    wanted = or_(
        table.c.state == RolloutState.QUEUING.value,
        and_(table.c.state == RolloutState.RUNNING.value, table.c.lease_until < now),
    )
    query = select(table).where(table.c.state.in_(_UNFINISHED), wanted)
    if run_id is not None:
        query = query.where(table.c.run_id == run_id)
    rows = conn.execute(query.order_by(table.c.created_seq).limit(limit)).all()
    for row in rows:
        if row.lease_owner is not None:
            detail = f"lost runner: {row.lease_owner} sent no heartbeat before {row.lease_until:.3f}"
            end_open_attempts(conn, row.rollout_id, Outcome.INFRA_ERROR, detail, "lost_runner", now)
            store.changed(conn, ATTEMPTS_TOPIC)
        _set(
            conn,
            row,
            now,
            state=RolloutState.RUNNING.value,
            lease_owner=owner,
            lease_until=now + lease_s,
        )
    if rows:
        store.changed(conn, TOPIC)
    return get_many(conn, [row.rollout_id for row in rows])


def heartbeat(conn: Connection, owner: str, rollout_ids: Sequence[str], lease_s: float, now: float) -> set[str]:
    """Extend the leases of `owner`; the ids that it still owns. Whoever is missing in the answer was lost or
    is over."""
    owned: set[str] = set()
    for piece in chunks(rollout_ids):
        mine = and_(
            table.c.rollout_id.in_(piece),
            table.c.lease_owner == owner,
            table.c.state == RolloutState.RUNNING.value,
        )
        found = conn.execute(select(table.c.rollout_id).where(mine)).scalars().all()
        conn.execute(update(table).where(mine).values(lease_until=now + lease_s))
        owned.update(found)
    return owned


def finish(
    conn: Connection,
    store: Store,
    rollout_id: str,
    *,
    state: RolloutState,
    outcome: Outcome,
    reward: float | None,
    error_message: str | None,
    now: float,
) -> Rollout:
    """Put a rollout into a terminal state, which is final. The identical call again is a no-op.

    Raises NotFound, Conflict if it is over otherwise or `state` may not follow, RecordError for a reward that
    is none.
    """
    assert state in TERMINAL, f"{state} is not terminal"
    total = None if reward is None else check_reward("total", reward)
    row = row_of(conn, rollout_id)
    ending = {
        "state": state.value,
        "outcome": Outcome(outcome).value,
        "reward": total,
        "error_message": error_message,
    }
    if row.state in TERMINAL:
        if all(getattr(row, name) == value for name, value in ending.items()):
            return rollout_of(row)
        raise Conflict(
            f"rollout {rollout_id!r} is over: {row.state}, outcome {row.outcome}, reward {row.reward}. "
            f"It cannot become {state.value}, outcome {ending['outcome']}, reward {total}; queue a new one"
        )
    _check_transition(row, state)
    _set(conn, row, now, **ending, **_over(conn))
    store.changed(conn, TOPIC)
    store.changed(conn, ATTEMPTS_TOPIC)
    return get(conn, rollout_id)


def release(conn: Connection, store: Store, rollout_id: str, now: float) -> None:
    """Give a rollout back after an outcome that is retried: still running, and the next lease may take it.

    Raises NotFound, Conflict if it is over.
    """
    row = row_of(conn, rollout_id)
    if row.state in TERMINAL:
        raise Conflict(f"rollout {rollout_id!r} is {row.state} and cannot be released; it is over")
    if row.lease_until == 0 and row.lease_owner is None:
        return
    _set(conn, row, now, state=RolloutState.RUNNING.value, lease_owner=None, lease_until=0.0)
    store.changed(conn, TOPIC)


def expire_leases(conn: Connection, store: Store, run_id: str, *, keep: str) -> None:
    """End the leases of a run that `keep` does not own: their owner is dead, and the next lease may take them."""
    mine = and_(
        table.c.run_id == run_id,
        table.c.state == RolloutState.RUNNING.value,
        table.c.lease_owner.is_not(None),
        table.c.lease_owner != keep,
    )
    if conn.execute(update(table).where(mine).values(lease_until=0.0)).rowcount:
        store.changed(conn, TOPIC)


def patch_status(
    conn: Connection,
    store: Store,
    rollout_id: str,
    *,
    state: RolloutState | None = None,
    job_name: str | None = None,
    last_attempt_id: str | None = None,
    error_message: str | None = None,
    now: float,
) -> Rollout:
    """What a controller outside may change by PATCH; `version` grows if anything did.

    A `last_attempt_id` that the store does not know becomes an attempt of that controller, without a token. A
    rollout that succeeds has outcome completed; one that fails has none, for nobody said why. Raises
    NotFound, Conflict for a forbidden transition or a change after the end, RecordError for an id that cannot
    be one.
    """
    row = row_of(conn, rollout_id)
    asked = {
        "state": state,
        "job_name": job_name,
        "last_attempt_id": last_attempt_id,
        "error_message": error_message,
    }
    values = {name: value for name, value in asked.items() if value is not None and value != getattr(row, name)}
    if not values:
        return rollout_of(row)
    if row.state in TERMINAL:
        raise Conflict(
            f"rollout {rollout_id!r} is {row.state}, which is final; {sorted(values)} cannot change any more"
        )
    if "last_attempt_id" in values:
        values.update(_adopt_attempt(conn, row, check_id(last_attempt_id, "last_attempt_id"), now))
    if "state" in values:
        assert state is not None
        _check_transition(row, state)
        values["state"] = RolloutState(state).value
        if state in TERMINAL:
            values.update(_over(conn))
        if state == RolloutState.SUCCEEDED:
            values["outcome"] = Outcome.COMPLETED.value
    _set(conn, row, now, **values)
    store.changed(conn, TOPIC)
    if state in TERMINAL:
        store.changed(conn, ATTEMPTS_TOPIC)
    return get(conn, rollout_id)


def delete(conn: Connection, store: Store, rollout_id: str) -> None:
    """Remove a rollout with its attempts, calls, spans and rewards; a no-op if it is gone."""
    row = conn.execute(select(table).where(table.c.rollout_id == rollout_id)).one_or_none()
    if row is None:
        return
    if row.finished_seq is not None:
        last = max(row.finished_seq, _finished_floor(conn))
        conn.execute(sql_delete(control).where(control.c.key == _FINISHED_KEY))
        conn.execute(control.insert().values(key=_FINISHED_KEY, value=str(last)))
    tried = select(attempts_table.c.attempt_id).where(attempts_table.c.rollout_id == rollout_id)
    called = select(calls.c.call_id).where(calls.c.attempt_id.in_(tried))
    for child in (choices, completions):
        conn.execute(sql_delete(child).where(child.c.call_id.in_(called)))
    for child in (calls, spans, rewards):
        conn.execute(sql_delete(child).where(child.c.attempt_id.in_(tried)))
    conn.execute(sql_delete(attempts_table).where(attempts_table.c.rollout_id == rollout_id))
    conn.execute(sql_delete(table).where(table.c.rollout_id == rollout_id))
    store.changed(conn, TOPIC)
    store.changed(conn, ATTEMPTS_TOPIC)


def cancel_unfinished(conn: Connection, store: Store, run_id: str, now: float) -> list[str]:
    """Fail what is queued or running of a run, with outcome cancelled; the ids of those rollouts."""
    query = select(table).where(table.c.run_id == run_id, table.c.state.in_(_UNFINISHED))
    rows = conn.execute(query.order_by(table.c.created_seq)).all()
    for row in rows:
        end_open_attempts(conn, row.rollout_id, Outcome.CANCELLED, "the run was stopped", "cancelled", now)
        _set(
            conn,
            row,
            now,
            state=RolloutState.FAILED.value,
            outcome=Outcome.CANCELLED.value,
            error_message="the run was stopped",
            **_over(conn),
        )
    if rows:
        store.changed(conn, TOPIC)
        store.changed(conn, ATTEMPTS_TOPIC)
    return [row.rollout_id for row in rows]


def repin(conn: Connection, store: Store, run_id: str, policy: str, version: int, now: float) -> list[str]:
    """From their next call on, the rollouts of a run that train and are not over ask for `version`; their ids.

    Those that are evaluated keep the version that is evaluated.
    """
    mine = (table.c.run_id == run_id, table.c.mode == "train", table.c.state.in_(_UNFINISHED))
    changed = []
    for row in conn.execute(select(table).where(*mine).order_by(table.c.created_seq)).all():
        pinned = json.loads(row.policy_versions)
        if pinned.get(policy) != version:
            _set(conn, row, now, policy_versions=json.dumps({**pinned, policy: version}, sort_keys=True))
            changed.append(row.rollout_id)
    if changed:
        store.changed(conn, TOPIC)
    return changed


def _set(conn: Connection, row: Any, now: float, **values: Any) -> None:
    conn.execute(
        update(table)
        .where(table.c.rollout_id == row.rollout_id)
        .values(version=row.version + 1, updated_at=now, **values)
    )


def _over(conn: Connection) -> dict[str, Any]:
    """The columns of a rollout that ends now."""
    last = conn.execute(select(func.coalesce(func.max(table.c.finished_seq), 0))).scalar_one()
    return {"finished_seq": max(last, _finished_floor(conn)) + 1, "lease_owner": None, "lease_until": None}


def _finished_floor(conn: Connection) -> int:
    value = conn.execute(select(control.c.value).where(control.c.key == _FINISHED_KEY)).scalar_one_or_none()
    return int(value or 0)


def _check_transition(row: Any, state: RolloutState) -> None:
    now = RolloutState(row.state)
    if state not in ROLLOUT_TRANSITIONS[now]:
        allowed = ", ".join(sorted(ROLLOUT_TRANSITIONS[now])) or "nothing, it is final"
        raise Conflict(f"rollout {row.rollout_id!r} is {now.value} and cannot become {state.value}; allowed: {allowed}")


def _adopt_attempt(conn: Connection, row: Any, attempt_id: str, now: float) -> dict[str, Any]:
    """Columns of a rollout whose controller names its newest attempt; makes the attempt if it is new."""
    owner = conn.execute(
        select(attempts_table.c.rollout_id).where(attempts_table.c.attempt_id == attempt_id)
    ).scalar_one_or_none()
    if owner is None:
        token = secrets.token_urlsafe(32)  # nobody gets it: the controller has a key of its own
        insert_attempt(conn, row.rollout_id, attempt_id, row.num_attempts + 1, token, "external", now)
        return {"num_attempts": row.num_attempts + 1}
    if owner != row.rollout_id:
        raise Conflict(f"attempt {attempt_id!r} belongs to rollout {owner!r}, not to {row.rollout_id!r}")
    return {}
