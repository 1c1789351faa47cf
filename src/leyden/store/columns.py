"""Rows to records and back, for the tables of rollouts and attempts. JSON is strict: no NaN, no foreign
types."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import Row

from leyden.base.errors import RecordError
from leyden.base.records import Attempt, Outcome, Rollout, RolloutState, Task

T = TypeVar("T")

CHUNK = 500
"""Values per IN list: well under the 32,766 parameters of SQLite, above which nothing is gained."""


def dump(value: object, what: str) -> str:
    """Compact JSON text of `value`. RecordError if it is no JSON."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        # Half a surrogate pair (a text cut inside a character) is JSON only when it is escaped.
        return text if is_text(text) else json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(
            f"{what} cannot be stored as JSON ({error}); use text keys, texts, finite numbers, lists"
        ) from error


def is_text(text: str) -> bool:
    """Whether `text` can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """`values` in pieces of at most CHUNK."""
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]


def rollout_row(rollout: Rollout, *, created_seq: int, created_at: float) -> dict[str, Any]:
    """The row of a new rollout: queuing, whatever state the record has."""
    task = rollout.task
    return {
        "rollout_id": rollout.id,
        "created_seq": created_seq,
        "run_id": rollout.run_id,
        "group_id": rollout.group_id,
        "step": rollout.step,
        "task_id": task.id,
        "split": task.split,
        "domain": task.domain,
        "purpose": task.purpose,
        "mode": rollout.mode,
        "input": dump(dict(task.input), f"the input of task {task.id!r}"),
        "answer": None if task.answer is None else dump(task.answer, f"the answer of task {task.id!r}"),
        "policy_versions": dump(dict(rollout.policy_versions), f"policy_versions of rollout {rollout.id!r}"),
        "sampling": dump(dict(rollout.sampling), f"sampling of rollout {rollout.id!r}"),
        "seed": rollout.seed,
        "metadata": dump(dict(rollout.metadata), f"metadata of rollout {rollout.id!r}"),
        "config": dump(dict(rollout.config), f"config of rollout {rollout.id!r}"),
        "state": RolloutState.QUEUING.value,
        "version": 1,
        "num_attempts": 0,
        "created_at": created_at,
        "updated_at": created_at,
    }


def rollout_of(row: Row[Any]) -> Rollout:
    """A row of `rollouts` as a record."""
    task = Task(
        id=row.task_id,
        split=row.split,
        domain=row.domain,
        input=json.loads(row.input),
        answer=None if row.answer is None else json.loads(row.answer),
        purpose=row.purpose,
    )
    return Rollout(
        id=row.rollout_id,
        task=task,
        mode=row.mode,
        run_id=row.run_id,
        group_id=row.group_id,
        step=row.step,
        policy_versions=json.loads(row.policy_versions),
        sampling=json.loads(row.sampling),
        seed=row.seed,
        metadata=json.loads(row.metadata),
        config=json.loads(row.config),
        state=RolloutState(row.state),
        version=row.version,
        num_attempts=row.num_attempts,
        last_attempt_id=row.last_attempt_id,
        outcome=None if row.outcome is None else Outcome(row.outcome),
        reward=row.reward,
        error_message=row.error_message,
        job_name=row.job_name,
        created_at=row.created_at,
        updated_at=row.updated_at,
        finished_seq=row.finished_seq,
    )


def attempt_of(row: Row[Any]) -> Attempt:
    """A row of `attempts` as a record; the hash of its token stays behind."""
    return Attempt(
        id=row.attempt_id,
        rollout_id=row.rollout_id,
        number=row.number,
        started_at=row.started_at,
        ended_at=row.ended_at,
        outcome=None if row.outcome is None else Outcome(row.outcome),
        exit_code=row.exit_code,
        detail=row.detail,
        diagnosis=row.diagnosis,
        stdout_tail=row.stdout_tail,
        stderr_tail=row.stderr_tail,
        duration_s=row.duration_s,
    )
