"""The small tables: policy versions, engines, runs, steps, evaluations, and a few values of control.

Functions over a connection. JSON columns are mappings on this side. Changes of policies and engines bump
topic `policies`, those of runs, steps and evaluations bump `runs`, those of control values bump `control`.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, and_, delete, insert, select, update

from leyden.base.errors import Conflict, NotFound
from leyden.base.records import PolicyVersion
from leyden.store.base import Store
from leyden.store.columns import dump
from leyden.store.schema import control, policies
from leyden.store.schema import engines as engines_table
from leyden.store.schema import evaluations as evaluations_table
from leyden.store.schema import runs as runs_table
from leyden.store.schema import steps as steps_table

TOPIC = "policies"
RUNS_TOPIC = "runs"
CONTROL_TOPIC = "control"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine that serves a model."""

    model: str
    """The name that calls ask for."""
    endpoint: str
    """Its base URL."""
    version: int
    """Version of the policy that it holds."""
    created_at: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run."""

    run_id: str
    """Unique in the store."""
    created_at: float
    """Seconds since the epoch."""
    config: Mapping[str, Any]
    """The resolved configuration."""
    versions: Mapping[str, Any]
    """Of this package, its libraries and the harness."""
    state: str
    """`running` or how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer round of a run."""

    run_id: str
    """Whose."""
    step: int
    """From 0 in each stage."""
    stage: str
    """`sft` or `rl`."""
    policy: str
    """What was trained."""
    version_before: int
    """The version that its rollouts asked for."""
    version_after: int
    """The version that came out."""
    report: Mapping[str, Any]
    """Numbers of the step."""
    created_at: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvaluation:
    """The result of one policy version on one split."""

    evaluation_id: str
    """Unique in the store."""
    run_id: str | None
    """The run that asked for it."""
    split: str
    """Of its tasks."""
    fingerprint: str
    """Of its set of tasks."""
    policy: str
    """What was evaluated."""
    version: int
    """Its version."""
    label: str
    """`base`, `final`, ..."""
    result: Mapping[str, Any]
    """What came out."""
    created_at: float
    """Seconds since the epoch."""


def add_policy_version(conn: Connection, store: Store, version: PolicyVersion, *, stage: str | None = None) -> None:
    """Register a version. Conflict if its number was ever used for this policy: names are never reused."""
    where = and_(policies.c.policy == version.policy, policies.c.version == version.version)
    if conn.execute(select(policies.c.version).where(where)).first() is not None:
        raise Conflict(f"policy version {version.name} exists already, and none is ever reused; take the next number")
    conn.execute(
        insert(policies).values(
            policy=version.policy,
            version=version.version,
            kind=version.kind,
            stage=stage,
            parent=version.parent,
            path=version.path,
            run_id=version.run_id,
            step=version.step,
            serving=False,
            created_at=version.created_at or time.time(),
            prompts=dump(dict(version.prompts), f"the prompts of {version.name}") if version.prompts else None,
        )
    )
    store.changed(conn, TOPIC)


def policy_versions(conn: Connection, policy: str | None = None) -> list[PolicyVersion]:
    """Versions by policy and number; of one policy if it is named."""
    query = select(policies).order_by(policies.c.policy, policies.c.version)
    if policy is not None:
        query = query.where(policies.c.policy == policy)
    return [_version_of(row) for row in conn.execute(query)]


def prompts_of(conn: Connection, policy: str, version: int) -> dict[str, Any]:
    """The slots of a version; empty for one without prompts and for one that is not registered."""
    where = and_(policies.c.policy == policy, policies.c.version == version)
    text = conn.execute(select(policies.c.prompts).where(where)).scalar_one_or_none()
    return json.loads(text) if text else {}


def stage_of(conn: Connection, policy: str, version: int) -> str | None:
    """The stage of its run that made a version, as it was registered. NotFound."""
    row = conn.execute(
        select(policies.c.stage).where(policies.c.policy == policy, policies.c.version == version)
    ).one_or_none()
    if row is None:
        raise NotFound(f"there is no policy version {policy}@{version}")
    stage: str | None = row.stage
    return stage


def set_serving(conn: Connection, store: Store, policy: str, version: int) -> None:
    """Make a registered version the one that answers calls without a version of their own. NotFound."""
    before = serving(conn, policy)
    if before is not None and before.version == version:
        return
    conn.execute(update(policies).where(policies.c.policy == policy).values(serving=False))
    chosen = conn.execute(
        update(policies).where(policies.c.policy == policy, policies.c.version == version).values(serving=True)
    )
    if chosen.rowcount == 0:
        raise NotFound(f"there is no policy version {policy}@{version}; register it before it can serve")
    store.changed(conn, TOPIC)


def serving(conn: Connection, policy: str) -> PolicyVersion | None:
    """The version of `policy` that serves, None if none was chosen."""
    row = conn.execute(select(policies).where(policies.c.policy == policy, policies.c.serving.is_(True))).one_or_none()
    return None if row is None else _version_of(row)


def all_serving(conn: Connection) -> dict[str, int]:
    """Policy to the number of the version that serves, for all policies that have one."""
    rows = conn.execute(select(policies.c.policy, policies.c.version).where(policies.c.serving.is_(True)))
    return {row.policy: row.version for row in rows}


def upsert_engine(conn: Connection, store: Store, model: str, endpoint: str, version: int = 0) -> Engine:
    """Add an engine, or set the version of one that is there."""
    where = {"model": model, "endpoint": endpoint}
    _replace(conn, engines_table, where, {"version": version, "created_at": time.time()})
    store.changed(conn, TOPIC)
    return next(engine for engine in engines(conn, model) if engine.endpoint == endpoint)


def engines(conn: Connection, model: str | None = None) -> list[Engine]:
    """Engines by model and endpoint; of one model if it is named."""
    query = select(engines_table).order_by(engines_table.c.model, engines_table.c.endpoint)
    if model is not None:
        query = query.where(engines_table.c.model == model)
    return [Engine(**row._mapping) for row in conn.execute(query)]


def clear_engines(conn: Connection, store: Store) -> None:
    """Forget all engines."""
    conn.execute(delete(engines_table))
    store.changed(conn, TOPIC)


def add_run(
    conn: Connection,
    store: Store,
    run_id: str,
    config: Mapping[str, Any],
    versions: Mapping[str, Any],
    *,
    state: str = "running",
    now: float | None = None,
) -> None:
    """Register a run. Conflict if the id exists."""
    if conn.execute(select(runs_table.c.run_id).where(runs_table.c.run_id == run_id)).first() is not None:
        raise Conflict(f"run {run_id!r} exists already; resume it, or choose another id")
    conn.execute(
        insert(runs_table).values(
            run_id=run_id,
            created_at=time.time() if now is None else now,
            config=dump(dict(config), "the configuration of a run"),
            versions=dump(dict(versions), "the versions of a run"),
            state=state,
        )
    )
    store.changed(conn, RUNS_TOPIC)


def set_run_state(conn: Connection, store: Store, run_id: str, state: str) -> None:
    """Say where a run is. NotFound."""
    if conn.execute(update(runs_table).where(runs_table.c.run_id == run_id).values(state=state)).rowcount == 0:
        raise NotFound(f"there is no run {run_id!r}")
    store.changed(conn, RUNS_TOPIC)


def get_run(conn: Connection, run_id: str) -> Run:
    """One run. NotFound."""
    for run in _runs(conn, run_id):
        return run
    raise NotFound(f"there is no run {run_id!r}")


def runs(conn: Connection) -> list[Run]:
    """All runs, oldest first."""
    return _runs(conn, None)


def add_step(
    conn: Connection,
    store: Store,
    *,
    run_id: str,
    step: int,
    stage: str,
    policy: str,
    version_before: int,
    version_after: int,
    report: Mapping[str, Any],
) -> None:
    """Record a step. A resumed run that repeats a step replaces its report: the later one led to the
    weights."""
    values = {
        "policy": policy,
        "version_before": version_before,
        "version_after": version_after,
        "report": dump(dict(report), f"the report of step {step} of run {run_id!r}"),
        "created_at": time.time(),
    }
    _replace(conn, steps_table, {"run_id": run_id, "step": step, "stage": stage}, values)
    store.changed(conn, RUNS_TOPIC)


def steps(conn: Connection, run_id: str) -> list[Step]:
    """The steps of a run in the order in which they were recorded."""
    query = select(steps_table).where(steps_table.c.run_id == run_id)
    rows = conn.execute(query.order_by(steps_table.c.created_at, steps_table.c.step))
    return [Step(**{**row._mapping, "report": json.loads(row.report)}) for row in rows]


def add_evaluation(
    conn: Connection,
    store: Store,
    *,
    evaluation_id: str,
    run_id: str | None,
    split: str,
    fingerprint: str,
    policy: str,
    version: int,
    label: str,
    result: Mapping[str, Any],
) -> None:
    """Record an evaluation. One of the same id is replaced if it is about the same thing (a resumed run);
    else Conflict."""
    about = {
        "run_id": run_id,
        "split": split,
        "fingerprint": fingerprint,
        "policy": policy,
        "version": version,
        "label": label,
    }
    before = conn.execute(
        select(evaluations_table).where(evaluations_table.c.evaluation_id == evaluation_id)
    ).one_or_none()
    if before is not None and any(getattr(before, name) != value for name, value in about.items()):
        raise Conflict(f"evaluation {evaluation_id!r} exists and is about something else; choose another id")
    text = dump(dict(result), f"the result of evaluation {evaluation_id!r}")
    values = {**about, "result": text.encode(), "created_at": time.time()}
    _replace(conn, evaluations_table, {"evaluation_id": evaluation_id}, values)
    store.changed(conn, RUNS_TOPIC)


def evaluations(conn: Connection, run_id: str | None = None, fingerprint: str | None = None) -> list[StoredEvaluation]:
    """Evaluations, oldest first; of one run or of one set of tasks if they are named."""
    query = select(evaluations_table).order_by(evaluations_table.c.created_at)
    if run_id is not None:
        query = query.where(evaluations_table.c.run_id == run_id)
    if fingerprint is not None:
        query = query.where(evaluations_table.c.fingerprint == fingerprint)
    return [StoredEvaluation(**{**row._mapping, "result": json.loads(row.result)}) for row in conn.execute(query)]


def get_control(conn: Connection, key: str) -> Any:
    """The value of a key, None if it was never set."""
    text = conn.execute(select(control.c.value).where(control.c.key == key)).scalar_one_or_none()
    return None if text is None else json.loads(text)


def set_control(conn: Connection, store: Store, key: str, value: Any) -> None:
    """Set a key to a JSON value."""
    _replace(conn, control, {"key": key}, {"value": dump(value, f"control value {key!r}")})
    store.changed(conn, CONTROL_TOPIC)


def set_quietly(conn: Connection, key: str, value: Any) -> None:
    """Set a key to a JSON value and wake nobody."""
    _replace(conn, control, {"key": key}, {"value": dump(value, f"control value {key!r}")})


def delete_control(conn: Connection, keys: Sequence[str]) -> None:
    """Forget values; wakes nobody."""
    conn.execute(delete(control).where(control.c.key.in_(keys)))


def control_below(conn: Connection, prefix: str) -> dict[str, Any]:
    """Every value whose key begins with `prefix`, by key."""
    query = select(control).where(control.c.key.startswith(prefix, autoescape=True)).order_by(control.c.key)
    return {row.key: json.loads(row.value) for row in conn.execute(query)}


def touch(conn: Connection, key: str) -> None:
    """Write the time into a key and wake nobody: whether the store can be written at all."""
    set_quietly(conn, key, time.time())


def _runs(conn: Connection, run_id: str | None) -> list[Run]:
    query = select(runs_table).order_by(runs_table.c.created_at)
    if run_id is not None:
        query = query.where(runs_table.c.run_id == run_id)
    return [
        Run(
            run_id=row.run_id,
            created_at=row.created_at,
            config=json.loads(row.config),
            versions=json.loads(row.versions),
            state=row.state,
        )
        for row in conn.execute(query)
    ]


def _replace(conn: Connection, table: Table, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Set the row of `key`, which is inserted if it is new."""
    where = and_(*(table.c[name] == value for name, value in key.items()))
    if conn.execute(update(table).where(where).values(**values)).rowcount == 0:
        conn.execute(insert(table).values(**key, **values))


def _version_of(row: Any) -> PolicyVersion:
    return PolicyVersion(
        policy=row.policy,
        version=row.version,
        kind=row.kind,
        parent=row.parent,
        path=row.path,
        run_id=row.run_id,
        step=row.step,
        created_at=row.created_at,
        prompts=json.loads(row.prompts) if row.prompts else {},
    )
