"""Cutting tasks into parts."""

from collections import Counter
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.base.errors import TaskError
from leyden.base.records import Task
from leyden.base.splitting import Parts, by_chance, by_domain, by_time


def dated(*times: object) -> list[Task]:
    return [Task(id=f"t{number}", input={"meta": {"at": time}}) for number, time in enumerate(times)]


def ids(parts: Parts) -> dict[str, list[str]]:
    return {name: [task.id for task in tasks] for name, tasks in parts.items()}


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=4, max_size=40), st.floats(0.05, 0.45), st.floats(0, 0.4))
def test_a_split_by_time_never_trains_on_the_future(times: list[int], holdout: float, val: float) -> None:
    try:
        parts = by_time(dated(*times), "meta.at", holdout=holdout, val=val)
    except TaskError as error:
        assert "no task for" in str(error)
        return
    assert Counter(t.id for tasks in parts.values() for t in tasks) == Counter(f"t{n}" for n in range(len(times)))
    assert all(task.split == name for name, tasks in parts.items() for task in tasks)
    at = {name: [task.input["meta"]["at"] for task in tasks] for name, tasks in parts.items()}
    assert max(at["train"]) < min([*at["val"], *at["holdout"]])
    assert not at["val"] or max(at["val"]) < min(at["holdout"])
    assert len(at["holdout"]) >= holdout * len(times) - 1e-6


def test_dates_are_compared_as_instants_whatever_their_zone() -> None:
    later = datetime(2025, 3, 1, 12, tzinfo=UTC)
    earlier = (later - timedelta(hours=1)).astimezone(timezone(timedelta(hours=5)))
    tasks = dated(later.isoformat(), earlier.isoformat(), "2025-01-01T00:00:00+00:00")
    assert ids(by_time(tasks, "meta.at", holdout=0.3))["holdout"] == ["t0"]
    assert ids(by_time(dated("2025-01-02", "2025-01-01"), "meta.at", holdout=0.5))["holdout"] == ["t0"]


@pytest.mark.parametrize(
    ("times", "complaint"),
    [
        ((1, "yesterday"), "'t1'.*yesterday.*ISO 8601"),
        ((1, "2025-01-01"), "number in some"),
        (("2025-01-01", "2025-01-01T00:00:00+00:00"), "time zone"),
        ((1, True), "no time"),
        ((1, 1, 1), "no task for train"),
    ],
)
def test_times_that_cannot_be_ordered_are_refused(times: tuple[object, ...], complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint):
        by_time(dated(*times), "meta.at", holdout=0.4)


def test_whole_domains_are_held_out() -> None:
    tasks = [Task(id=f"t{n}", domain="abc"[n % 3]) for n in range(9)]
    parts = by_domain(tasks, holdout=["c"], val=["b"])
    assert {name: {t.domain for t in found} for name, found in parts.items()} == {
        "train": {"a"}, "val": {"b"}, "holdout": {"c"}
    }  # fmt: skip
    with pytest.raises(TaskError, match=r"'z'.*'a', 'b', 'c'"):
        by_domain(tasks, holdout=["z"])
    with pytest.raises(TaskError, match="as holdout and as val"):
        by_domain(tasks, holdout=["a"], val=["a"])
    with pytest.raises(TaskError, match="no task for train"):
        by_domain(tasks, holdout=["a", "b", "c"])


def test_chance_is_the_same_again_and_equal_inputs_stay_together() -> None:
    tasks = [Task(id=f"t{n}", input={"q": n // 2}) for n in range(200)]
    parts = by_chance(tasks, holdout=0.2, val=0.1, seed=3)
    assert parts == by_chance(tasks[::-1], holdout=0.2, val=0.1, seed=3)
    assert parts != by_chance(tasks, holdout=0.2, val=0.1, seed=4)
    assert {n: len(t) for n, t in parts.items()} == {"train": 140, "val": 20, "holdout": 40}
    where = {task.id: name for name, found in parts.items() for task in found}
    assert all(where[f"t{n}"] == where[f"t{n + 1}"] for n in range(0, 200, 2))


@pytest.mark.parametrize(("holdout", "val"), [(0.0, 0.1), (1.0, 0.0), (0.6, 0.5), (0.5, 0.5), (0.2, -0.1)])
def test_contradictory_shares_are_refused(holdout: float, val: float) -> None:
    with pytest.raises(TaskError, match="holdout"):
        by_chance([Task(id="a")], holdout=holdout, val=val)
