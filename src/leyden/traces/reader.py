"""The only road out of the trace tables: calls, spans and rewards as records, differences rebuilt.

Reading many traces takes a handful of queries. Arrays are read-only views. It decodes; it does not judge: an
intent without a completion comes out as a call with status `open`.
Letters of shapes: P = prompt tokens, R = completion tokens.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from sqlalchemy import Connection, Row, func, select, tuple_

from leyden.base.errors import NotFound, StoreError
from leyden.base.records import (
    Attempt,
    Call,
    Choice,
    IntArray,
    LiveOrigin,
    Outcome,
    Provenance,
    Reward,
    Rollout,
    Span,
    Trace,
)
from leyden.store import queue
from leyden.store.base import Store
from leyden.store.columns import attempt_of, chunks
from leyden.store.schema import attempts, calls, choices, completions, live_calls, rewards, spans
from leyden.traces.rows import (
    choice_of,
    first_completion,
    live_of,
    restore_request,
    reward_of,
    span_of,
    unpack_ids,
    unpack_json,
)

T = TypeVar("T")

_NO_IDS = np.zeros(0, np.int32)
_OPEN: Final = "open"
"""Status and refusal of a call that was in flight when something died."""


class Reader:
    """Reads traces from a store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def trace(self, rollout_id: str) -> Trace:
        """Everything about the last attempt of a rollout. NotFound."""
        return self.traces([rollout_id])[0]

    def traces(self, rollout_ids: Sequence[str]) -> list[Trace]:
        """Traces in the order of `rollout_ids`. NotFound.

        A rollout that was never tried (cancelled in the queue, say) has an attempt with number 0 and nothing
        else.
        """
        return self._store.read(lambda connection: _traces(connection, rollout_ids))

    def call(self, call_id: str) -> Call:
        """One call. NotFound."""

        def query(connection: Connection) -> Call:
            row = connection.execute(select(calls.c.attempt_id).where(calls.c.call_id == call_id)).one_or_none()
            if row is None:
                raise NotFound(f"there is no call {call_id!r}")
            # A call is a difference to others of its attempt; live calls stand alone.
            where = calls.c.call_id == call_id if row.attempt_id is None else calls.c.attempt_id == row.attempt_id
            return next(call for call in _calls(connection, where) if call.id == call_id)

        return self._store.read(query)

    def find_call(self, attempt_id: str, digest: str, occurrence: int) -> Call | None:
        """The call of an attempt with this request digest and occurrence, None if there is none."""

        def query(connection: Connection) -> Call | None:
            found = connection.execute(
                select(calls.c.call_id).where(
                    calls.c.attempt_id == attempt_id,
                    calls.c.digest == digest,
                    calls.c.occurrence == occurrence,
                )
            ).scalar_one_or_none()
            if found is None:
                return None
            return next(call for call in _calls(connection, calls.c.attempt_id == attempt_id) if call.id == found)

        return self._store.read(query)

    def calls_of(self, attempt_id: str) -> list[Call]:
        """The calls of an attempt in order of arrival; empty for an unknown attempt."""
        return self._store.read(lambda connection: _calls(connection, calls.c.attempt_id == attempt_id))

    def live_calls(
        self, *, since: float = float("-inf"), until: float = float("inf"), after: tuple[float, str] | None = None,
        limit: int = 10_000,
    ) -> list[Call]:  # fmt: skip
        """Calls of live traffic that started from `since` to `until`, in order of (start, id), at most `limit` of them;
        `after` is where the page before ended."""
        place = tuple_(calls.c.started_at, calls.c.call_id)
        where = [calls.c.started_at >= since, calls.c.started_at <= until]
        if after is not None:
            where.append(place > after)
        query = (
            select(calls.c.call_id)
            .join(live_calls, live_calls.c.call_id == calls.c.call_id)
            .where(*where)
            .order_by(calls.c.started_at, calls.c.call_id)
            .limit(limit)
        )

        def page(connection: Connection) -> list[Call]:
            ids = list(connection.execute(query).scalars())
            found = [call for some in chunks(ids) for call in _calls(connection, calls.c.call_id.in_(some))]
            return sorted(found, key=lambda call: (call.started_at, call.id))

        return self._store.read(page)

    def spans_of(self, attempt_id: str) -> list[Span]:
        """The spans of an attempt in order of start; empty for an unknown attempt."""
        query = select(spans).where(spans.c.attempt_id == attempt_id).order_by(spans.c.started_at, spans.c.span_id)
        return self._store.read(lambda connection: [span_of(row) for row in connection.execute(query)])

    def num_completion_tokens(self, attempt_id: str) -> int:
        """Tokens sampled in an attempt so far, over all choices."""
        query = (
            select(func.coalesce(func.sum(func.length(choices.c.completion_ids)), 0))
            .join(calls, calls.c.call_id == choices.c.call_id)
            .where(calls.c.attempt_id == attempt_id)
        )
        num_bytes: int = self._store.read(lambda connection: connection.execute(query).scalar_one())
        return num_bytes // 4


def _traces(conn: Connection, rollout_ids: Sequence[str]) -> list[Trace]:
    rollouts = queue.get_many(conn, rollout_ids)
    tried = _last_attempts(conn, rollouts)
    ids = [attempt.id for attempt in tried.values()]
    calls_of: dict[str | None, list[Call]] = defaultdict(list)
    spans_of: dict[str, list[Span]] = defaultdict(list)
    rewards_of: dict[str, list[Reward]] = defaultdict(list)
    for piece in chunks(ids):
        for call in _calls(conn, calls.c.attempt_id.in_(piece)):
            calls_of[call.attempt_id].append(call)
        query = select(spans).where(spans.c.attempt_id.in_(piece)).order_by(spans.c.started_at, spans.c.span_id)
        for row in conn.execute(query):
            spans_of[row.attempt_id].append(span_of(row))
        query = select(rewards).where(rewards.c.attempt_id.in_(piece))
        for row in conn.execute(query.order_by(rewards.c.created_at, rewards.c.reward_id)):
            rewards_of[row.attempt_id].append(reward_of(row))
    found = []
    for rollout in rollouts:
        attempt = tried.get(rollout.id) or _untried(rollout)
        found.append(
            Trace(
                rollout=rollout,
                attempt=attempt,
                calls=calls_of[attempt.id],
                spans=spans_of[attempt.id],
                rewards=rewards_of[attempt.id],
            )
        )
    return found


def _last_attempts(conn: Connection, rollouts: Sequence[Rollout]) -> dict[str, Attempt]:
    """The newest attempt by rollout."""
    ids = [rollout.last_attempt_id for rollout in rollouts if rollout.last_attempt_id is not None]
    found: dict[str, Attempt] = {}
    for piece in chunks(ids):
        for row in conn.execute(select(attempts).where(attempts.c.attempt_id.in_(piece))):
            found[row.rollout_id] = attempt_of(row)
    return found


def _untried(rollout: Rollout) -> Attempt:
    return Attempt(
        id="",
        rollout_id=rollout.id,
        number=0,
        started_at=rollout.created_at,
        ended_at=rollout.updated_at if rollout.finished_seq is not None else None,
        outcome=rollout.outcome or (Outcome.CANCELLED if rollout.finished_seq is not None else None),
        detail="the rollout was never tried",
    )


def _calls(conn: Connection, where: Any) -> list[Call]:
    """Calls of whole attempts (or single live calls) that `where` selects, in order of arrival."""
    rows = {row.call_id: row for row in conn.execute(select(calls).where(where))}
    mine = select(calls.c.call_id).where(where)
    ends = {row.call_id: row for row in conn.execute(select(completions).where(completions.c.call_id.in_(mine)))}
    sampled: dict[str, list[Choice]] = defaultdict(list)
    query = select(choices).where(choices.c.call_id.in_(mine)).order_by(choices.c.call_id, choices.c.choice_index)
    for row in conn.execute(query):
        sampled[row.call_id].append(choice_of(row))
    requests: dict[str, Mapping[str, Any]] = {}
    prompts: dict[str, IntArray] = {}
    _resolve(
        rows,
        lambda call_id: rows[call_id].request_parent,
        lambda call_id, parent: restore_request(
            unpack_json(rows[call_id].request), parent, rows[call_id].shared_messages
        ),
        requests,
    )

    def prompt_of(call_id: str, parent: IntArray | None) -> IntArray:
        end = ends[call_id]
        tail = unpack_ids(end.prompt_tail)
        if parent is None:
            return tail
        seen = np.concatenate([parent, first_completion(sampled[end.prompt_parent])])
        return np.concatenate([seen[: end.shared_tokens], tail])

    _resolve(ends, lambda call_id: ends[call_id].prompt_parent, prompt_of, prompts)
    live = _live(conn, mine) if any(row.origin == "live" for row in rows.values()) else {}
    order = sorted(rows.values(), key=lambda row: (row.attempt_id or "", row.seq, row.started_at, row.call_id))
    return [
        _call(
            row,
            ends.get(row.call_id),
            requests[row.call_id],
            prompts.get(row.call_id, _NO_IDS),
            sampled[row.call_id],
            live.get(row.call_id),
        )
        for row in order
    ]


def _live(conn: Connection, ids: Any) -> dict[str, LiveOrigin]:
    """Who is behind live calls."""
    rows = conn.execute(select(live_calls).where(live_calls.c.call_id.in_(ids)))
    return {row.call_id: live_of(row) for row in rows}


def _resolve(
    ids: Iterable[str],
    parent_of: Callable[[str], str | None],
    build: Callable[[str, T | None], T],
    built: dict[str, T],
) -> None:
    """Fill `built` with every id, parents before children, without recursion: chains are as long as
    conversations."""
    for start in ids:
        chain = []
        call_id: str | None = start
        try:
            while call_id is not None and call_id not in built:
                chain.append(call_id)
                call_id = parent_of(call_id)
        except KeyError as error:
            raise StoreError(f"call {chain[-2]} is stored as a difference to call {error}, which is gone") from None
        for call_id in reversed(chain):
            parent = parent_of(call_id)
            built[call_id] = build(call_id, None if parent is None else built[parent])


def _call(
    row: Row[Any],
    end: Row[Any] | None,
    request: Mapping[str, Any],
    prompt_ids: IntArray,
    sampled: Sequence[Choice],
    live: LiveOrigin | None,
) -> Call:
    sampling = json.loads(row.sampling)
    response = None if end is None else unpack_json(end.response)
    return Call(
        id=row.call_id,
        rollout_id=row.rollout_id,
        attempt_id=row.attempt_id,
        seq=row.seq,
        dialect=row.dialect,
        alias=row.alias,
        policy=row.policy,
        policy_version=row.policy_version,
        # Nobody knows the tokens of a call that was cut off.
        provenance=Provenance.ALTERED if end is None else Provenance(end.provenance),
        request=request,
        response=response or None,
        sampling=sampling.get("used", sampling),
        prompt_ids=prompt_ids,
        choices=sampled,
        status=_OPEN if end is None else end.status,
        delivered=end is not None and end.delivered,
        refusal=_OPEN if end is None else end.refusal,
        rewrites=json.loads(row.rewrites),
        error=None if end is None else end.error,
        http_status=0 if end is None else end.http_status,
        started_at=row.started_at,
        latency_ms=0.0 if end is None else end.latency_ms,
        retry_count=0 if end is None else end.retry_count,
        usage={} if end is None else json.loads(end.usage),
        live=live,
        slots={} if row.slots is None else unpack_json(row.slots),
    )
