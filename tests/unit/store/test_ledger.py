"""The small tables: what is never reused, what may be repeated, and what comes back."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from leyden.base.errors import Conflict, NotFound, RecordError
from leyden.base.records import PolicyVersion
from leyden.store import ledger, open_store
from leyden.store.base import Store

T = TypeVar("T")
BOUND_S = 20.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    yield opened
    opened.close()


def write(store: Store, job: Callable[..., T], *arguments: Any, **options: Any) -> T:
    return store.write(lambda c: job(c, store, *arguments, **options)).result(BOUND_S)


def read(store: Store, query: Callable[..., T], *arguments: Any, **options: Any) -> T:
    return store.read(lambda c: query(c, *arguments, **options))


def test_policy_versions_come_back_and_are_never_reused(store: Store) -> None:
    zero = PolicyVersion(policy="main", version=0, path="base", created_at=5.0)
    one = PolicyVersion(policy="main", version=1, kind="prompt", parent=0, run_id="r", step=2, created_at=6.0)
    other = PolicyVersion(policy="judge", version=0, created_at=7.0)
    for version in (one, zero, other):
        write(store, ledger.add_policy_version, version, stage="rl" if version is one else None)
    assert read(store, ledger.policy_versions) == [other, zero, one]
    assert read(store, ledger.policy_versions, "main") == [zero, one]
    assert read(store, ledger.stage_of, "main", 1) == "rl"
    assert read(store, ledger.stage_of, "main", 0) is None
    with pytest.raises(NotFound):
        read(store, ledger.stage_of, "main", 2)
    with pytest.raises(Conflict, match=r"main@1 exists already.*next number"):
        write(store, ledger.add_policy_version, one)


def test_one_version_of_a_policy_serves(store: Store) -> None:
    for name, number in (("main", 0), ("main", 1), ("judge", 0)):
        write(store, ledger.add_policy_version, PolicyVersion(policy=name, version=number))
    assert read(store, ledger.serving, "main") is None
    count = store.count(ledger.TOPIC)
    for number in (0, 1, 1):
        write(store, ledger.set_serving, "main", number)
    assert store.count(ledger.TOPIC) == count + 2
    found = read(store, ledger.serving, "main")
    assert found is not None
    assert found.name == "main@1"
    assert read(store, ledger.all_serving) == {"main": 1}
    with pytest.raises(NotFound, match="main@7"):
        write(store, ledger.set_serving, "main", 7)
    assert read(store, ledger.all_serving) == {"main": 1}


def test_engines_are_replaced_by_model_and_endpoint(store: Store) -> None:
    write(store, ledger.upsert_engine, "main", "http://b")
    write(store, ledger.upsert_engine, "main", "http://a", 1)
    assert write(store, ledger.upsert_engine, "main", "http://a", 2).version == 2
    write(store, ledger.upsert_engine, "judge", "http://a")
    assert [(e.model, e.endpoint, e.version) for e in read(store, ledger.engines)] == [
        ("judge", "http://a", 0),
        ("main", "http://a", 2),
        ("main", "http://b", 0),
    ]
    assert len(read(store, ledger.engines, "judge")) == 1
    write(store, ledger.clear_engines)
    assert read(store, ledger.engines) == []


def test_a_run_is_registered_once_and_says_where_it_is(store: Store) -> None:
    write(store, ledger.add_run, "r", {"learn": {"steps": 3}}, {"leyden": "1"}, now=9.0)
    with pytest.raises(Conflict, match="'r' exists already"):
        write(store, ledger.add_run, "r", {}, {})
    write(store, ledger.set_run_state, "r", "done")
    run = read(store, ledger.get_run, "r")
    assert run == ledger.Run(
        run_id="r", created_at=9.0, config={"learn": {"steps": 3}}, versions={"leyden": "1"}, state="done"
    )
    assert read(store, ledger.runs) == [run]
    for operation in (
        lambda: read(store, ledger.get_run, "x"),
        lambda: write(store, ledger.set_run_state, "x", "done"),
    ):
        with pytest.raises(NotFound, match="'x'"):
            operation()


def test_a_step_that_is_repeated_after_a_resume_replaces_its_report(store: Store) -> None:
    def step(number: int, stage: str, loss: float) -> None:
        write(
            store,
            ledger.add_step,
            run_id="r",
            step=number,
            stage=stage,
            policy="main",
            version_before=number,
            version_after=number + 1,
            report={"loss": loss},
        )

    step(0, "sft", 3.0)
    step(0, "rl", 2.0)
    step(1, "rl", 1.0)
    step(1, "rl", 0.5)
    found = [(s.stage, s.step, s.report["loss"]) for s in read(store, ledger.steps, "r")]
    assert found == [("sft", 0, 3.0), ("rl", 0, 2.0), ("rl", 1, 0.5)]
    assert read(store, ledger.steps, "other") == []


def test_a_report_with_nan_is_refused_by_name(store: Store) -> None:
    with pytest.raises(RecordError, match="report of step 1 of run 'r'"):
        write(
            store,
            ledger.add_step,
            run_id="r",
            step=1,
            stage="rl",
            policy="main",
            version_before=0,
            version_after=1,
            report={"loss": float("nan")},
        )


def test_an_evaluation_may_be_repeated_but_not_become_another(store: Store) -> None:
    about: dict[str, Any] = {
        "evaluation_id": "r-base",
        "run_id": "r",
        "split": "holdout",
        "fingerprint": "f",
        "policy": "main",
        "version": 0,
        "label": "base",
    }
    write(store, ledger.add_evaluation, **about, result={"mean": 0.5})
    write(store, ledger.add_evaluation, **about, result={"mean": 0.6})
    write(store, ledger.add_evaluation, **{**about, "evaluation_id": "q", "run_id": None}, result={})
    with pytest.raises(Conflict, match="r-base"):
        write(store, ledger.add_evaluation, **{**about, "version": 1}, result={})
    found = read(store, ledger.evaluations, run_id="r")
    assert [(e.evaluation_id, e.result) for e in found] == [("r-base", {"mean": 0.6})]
    assert len(read(store, ledger.evaluations, fingerprint="f")) == 2
    assert read(store, ledger.evaluations, fingerprint="g") == []


def test_control_values_are_json(store: Store) -> None:
    assert read(store, ledger.get_control, "hold") is None
    for value in ({"paused": True, "reason": "\u00fc"}, [1, 2.5], "text", None):
        write(store, ledger.set_control, "hold", value)
        assert read(store, ledger.get_control, "hold") == value
    assert store.count(ledger.CONTROL_TOPIC) == 4
