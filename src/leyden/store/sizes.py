"""How many bytes the store keeps of rollouts. Reads only; knows no meaning.

Counted are the columns that grow with use (bodies, token ids, log-probabilities, texts), not indexes and page overhead:
the file is larger than the sum.
"""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, func, select

from leyden.store.columns import chunks
from leyden.store.schema import attempts, calls, choices, completions, rollouts, spans


def _length(*columns: ColumnElement[object]) -> ColumnElement[int]:
    total: ColumnElement[int] = func.coalesce(func.sum(func.length(columns[0])), 0)
    for column in columns[1:]:
        total = total + func.coalesce(func.sum(func.length(column)), 0)
    return total


def storage_bytes(conn: Connection, rollout_ids: Sequence[str]) -> int:
    """Bytes kept of these rollouts, all their attempts together; 0 for ids that are not there."""
    total = 0
    for piece in chunks(rollout_ids):
        mine = select(calls.c.call_id).where(calls.c.rollout_id.in_(piece))
        for query in (
            select(_length(rollouts.c.input, rollouts.c.answer, rollouts.c.metadata)).where(
                rollouts.c.rollout_id.in_(piece)
            ),
            select(_length(attempts.c.stdout_tail, attempts.c.stderr_tail, attempts.c.detail)).where(
                attempts.c.rollout_id.in_(piece)
            ),
            select(_length(calls.c.request, calls.c.sampling)).where(calls.c.rollout_id.in_(piece)),
            select(_length(completions.c.response, completions.c.prompt_tail, completions.c.usage)).where(
                completions.c.call_id.in_(mine)
            ),
            select(_length(choices.c.completion_ids, choices.c.logprobs, choices.c.text)).where(
                choices.c.call_id.in_(mine)
            ),
            select(_length(spans.c.attributes)).where(spans.c.rollout_id.in_(piece)),
        ):
            total += int(conn.execute(query).scalar_one())
    return total


def rollouts_of_run(conn: Connection, run_id: str) -> list[str]:
    """Ids of the rollouts of a run, in order of creation."""
    query = select(rollouts.c.rollout_id).where(rollouts.c.run_id == run_id).order_by(rollouts.c.created_seq)
    return list(conn.execute(query).scalars())
