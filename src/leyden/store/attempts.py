"""Attempts of rollouts: started with a token of their own, ended once. Part of the queue; import it from
there.

A token is returned once and stored as its SHA-256 only. It is dead when its attempt has ended:
`attempt_by_token` still says whose it was, and `ended_at` of the attempt says that it is dead.
"""

import hashlib
import hmac
import secrets

from sqlalchemy import Connection, select, update

from leyden.base.errors import Conflict, NotFound, RecordError
from leyden.base.records import Attempt, Outcome, Rollout, RolloutState, new_id
from leyden.store.base import Store
from leyden.store.columns import attempt_of, rollout_of
from leyden.store.schema import attempts as table
from leyden.store.schema import rollouts

TOPIC = "rollouts"
"""Changes whenever a rollout or an attempt does."""
ATTEMPTS_TOPIC = "attempts"
"""Changes whenever an attempt or its rollout ends or goes away: what was read about it before is stale."""
TERMINAL = (RolloutState.SUCCEEDED, RolloutState.FAILED)
"""States that are final."""


def start_attempt(conn: Connection, store: Store, rollout_id: str, owner: str, now: float) -> tuple[Attempt, str]:
    """A new attempt and its token. NotFound; Conflict if the rollout is over, leased by another owner, or has
    an attempt that has not ended.
    """
    row = conn.execute(select(rollouts).where(rollouts.c.rollout_id == rollout_id)).one_or_none()
    if row is None:
        raise NotFound(f"there is no rollout {rollout_id!r}; it may have been deleted")
    if row.state in TERMINAL:
        raise Conflict(f"rollout {rollout_id!r} is {row.state}, so no attempt can start; queue a new rollout")
    if row.lease_owner is not None and row.lease_owner != owner:
        raise Conflict(f"rollout {rollout_id!r} is leased by {row.lease_owner!r}, not by {owner!r}; let go of it")
    still_open = conn.execute(
        select(table.c.number).where(table.c.rollout_id == rollout_id, table.c.ended_at.is_(None))
    ).first()
    if still_open is not None:
        raise Conflict(f"attempt {still_open.number} of rollout {rollout_id!r} has not ended; end it first")
    token = f"ley-{secrets.token_urlsafe(32)}"
    attempt = insert_attempt(conn, rollout_id, new_id("att"), row.num_attempts + 1, token, owner, now)
    conn.execute(
        update(rollouts)
        .where(rollouts.c.rollout_id == rollout_id)
        .values(
            num_attempts=attempt.number,
            last_attempt_id=attempt.id,
            state=RolloutState.RUNNING.value,
            version=row.version + 1,
            updated_at=now,
        )
    )
    store.changed(conn, TOPIC)
    return attempt, token


def insert_attempt(
    conn: Connection, rollout_id: str, attempt_id: str, number: int, token: str, runner: str, now: float
) -> Attempt:
    """The row of an attempt that starts now; the caller updates the rollout."""
    attempt = Attempt(id=attempt_id, rollout_id=rollout_id, number=number, started_at=now)
    conn.execute(
        table.insert().values(
            attempt_id=attempt_id,
            rollout_id=rollout_id,
            number=number,
            token_hash=_hash(token),
            started_at=now,
            detail="",
            stdout_tail="",
            stderr_tail="",
            runner=runner,
        )
    )
    return attempt


def end_attempt(conn: Connection, store: Store, attempt: Attempt) -> None:
    """Write how `attempt` ended; its token is dead from then on. Ending twice with the same outcome is a
    no-op.

    Raises RecordError if the record has no outcome or no end, NotFound, Conflict if it has ended otherwise.
    """
    if attempt.outcome is None or attempt.ended_at is None:
        raise RecordError(f"attempt {attempt.id!r} has no outcome or no ended_at; set both to end it")
    changed = conn.execute(
        update(table)
        .where(table.c.attempt_id == attempt.id, table.c.ended_at.is_(None))
        .values(
            ended_at=attempt.ended_at,
            outcome=attempt.outcome.value,
            exit_code=attempt.exit_code,
            detail=attempt.detail,
            diagnosis=attempt.diagnosis,
            stdout_tail=attempt.stdout_tail,
            stderr_tail=attempt.stderr_tail,
            duration_s=attempt.duration_s,
        )
    )
    if changed.rowcount:
        store.changed(conn, TOPIC)
        store.changed(conn, ATTEMPTS_TOPIC)
        return
    outcome = conn.execute(select(table.c.outcome).where(table.c.attempt_id == attempt.id)).scalar_one_or_none()
    if outcome is None:
        raise NotFound(f"there is no attempt {attempt.id!r}; its rollout may have been deleted")
    if outcome != attempt.outcome:
        raise Conflict(f"attempt {attempt.id!r} has ended as {outcome}; it cannot end as {attempt.outcome} too")


def end_open_attempts(
    conn: Connection, rollout_id: str, outcome: Outcome, detail: str, diagnosis: str, now: float
) -> None:
    """End what still runs of a rollout that was taken away from its runner."""
    conn.execute(
        update(table)
        .where(table.c.rollout_id == rollout_id, table.c.ended_at.is_(None))
        .values(ended_at=now, outcome=outcome.value, detail=detail, diagnosis=diagnosis)
    )


def attempts(conn: Connection, rollout_id: str) -> list[Attempt]:
    """All attempts of a rollout, first to last; empty for an unknown rollout."""
    rows = conn.execute(select(table).where(table.c.rollout_id == rollout_id).order_by(table.c.number))
    return [attempt_of(row) for row in rows]


def attempt_by_token(conn: Connection, token: str) -> tuple[Attempt, Rollout] | None:
    """Whose token it is, also when it is dead (then `ended_at` is set); None for an unknown token."""
    digest = _hash(token)
    row = conn.execute(select(table).where(table.c.token_hash == digest)).one_or_none()
    # The lookup compares hashes, which tell nothing about tokens; the last word is a comparison in constant
    # time.
    if row is None or not hmac.compare_digest(row.token_hash, digest):
        return None
    rollout = conn.execute(select(rollouts).where(rollouts.c.rollout_id == row.rollout_id)).one_or_none()
    return None if rollout is None else (attempt_of(row), rollout_of(rollout))


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
