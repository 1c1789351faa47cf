from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.base.errors import HoldoutError, TaskError
from leyden.base.records import Task, check_id
from leyden.learning.credit import GroupStats
from leyden.learning.schedule import TaskOrder, diagnose, learning_rate_at, plan_step

SCHEDULES: list[Literal["constant", "linear", "cosine"]] = ["constant", "linear", "cosine"]


def tasks(num: int) -> list[Task]:
    return [Task(id=f"t{i}") for i in range(num)]


@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 3))
def test_each_task_comes_once_per_epoch(num: int, per_step: int, seed: int) -> None:
    order = TaskOrder(tasks(num), per_step, seed)
    flat = [task.id for step in range(num) for task in order.tasks_at(step)]
    assert len(flat) == num * per_step
    for epoch in range(per_step):
        assert sorted(flat[epoch * num : (epoch + 1) * num]) == sorted(t.id for t in tasks(num))


def test_a_resumed_order_goes_on_where_the_first_would_have_been() -> None:
    first = TaskOrder(tasks(7), 3, seed=4)
    expected = [first.tasks_at(step) for step in range(9)]
    assert [TaskOrder(tasks(7), 3, seed=4).tasks_at(step) for step in (8, 2, 5)] == [expected[s] for s in (8, 2, 5)]


def test_the_order_depends_on_the_seed_and_not_on_the_file() -> None:
    here = TaskOrder(tasks(20), 20, seed=0).tasks_at(0)
    assert TaskOrder(tasks(20)[::-1], 20, seed=0).tasks_at(0) == here
    assert TaskOrder(tasks(20), 20, seed=1).tasks_at(0) != here
    assert TaskOrder(tasks(20), 20, seed=0).tasks_at(1) != here


def test_tasks_that_cannot_be_trained_on_are_refused() -> None:
    with pytest.raises(TaskError, match="no tasks"):
        TaskOrder([], 1, 0)
    with pytest.raises(TaskError, match="'t0'"):
        TaskOrder([Task(id="t0"), Task(id="t0")], 1, 0)
    held = Task(id="h", split="holdout")
    with pytest.raises(HoldoutError, match="'h'"):
        TaskOrder([held], 1, 0)
    with pytest.raises(HoldoutError, match="'h'"):
        plan_step("run", 0, [held], 2, {"main": 0})
    assert len(plan_step("run", 0, [held], 2, {"main": 0}, mode="val")) == 2


def test_a_step_planned_again_is_the_same_step() -> None:
    chosen = tasks(3)
    first = plan_step("run", 2, chosen, 4, {"main": 5}, seed=7, sampling={"temperature": 1.0})
    assert plan_step("run", 2, chosen, 4, {"main": 5}, seed=7, sampling={"temperature": 1.0}) == first
    assert len({r.id for r in first}) == 12 and len({r.group_id for r in first}) == 3
    assert len({r.seed for r in first}) == 12 and all(0 <= r.seed < 2**31 for r in first)
    for rollout in first:
        assert check_id(rollout.id, "rollout") and check_id(rollout.group_id, "group")
        assert (rollout.run_id, rollout.step, rollout.policy_versions) == ("run", 2, {"main": 5})


def test_other_runs_and_steps_have_other_ids_but_a_second_run_samples_the_same() -> None:
    plans = [plan_step(run_id, step, tasks(2), 2, {"main": 0}) for run_id, step in [("one", 0), ("one", 1), ("two", 0)]]
    assert len({r.id for plan in plans for r in plan}) == 12
    assert [r.seed for r in plans[0]] == [r.seed for r in plans[2]]
    assert {r.seed for r in plans[0]}.isdisjoint(r.seed for r in plans[1])


def test_a_task_that_is_there_twice_in_a_step_is_two_groups() -> None:
    plan = plan_step("run", 0, [Task(id="t"), Task(id="t")], 2, {"main": 0})
    assert len({r.group_id for r in plan}) == 2 and len({r.id for r in plan}) == 4


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_the_learning_rate_rises_to_its_peak_and_never_again(
    schedule: Literal["constant", "linear", "cosine"], warmup: int
) -> None:
    rates = [learning_rate_at(step, 10, schedule, warmup, 2.0) for step in range(10)]
    top = max(warmup - 1, 0)
    assert rates[:warmup] == pytest.approx([2.0 * (s + 1) / warmup for s in range(warmup)])
    assert rates[top] == 2.0 == max(rates)
    assert all(a >= b > 0 for a, b in zip(rates[top:-1], rates[top + 1 :], strict=True))


def test_each_schedule_has_its_shape() -> None:
    assert learning_rate_at(5, 10, "constant", 0, 1.0) == 1.0
    assert learning_rate_at(5, 10, "linear", 0, 1.0) == pytest.approx(0.5)
    assert learning_rate_at(5, 10, "cosine", 0, 1.0) == pytest.approx(0.5)
    assert learning_rate_at(9, 10, "linear", 0, 1.0) == pytest.approx(0.1)
    assert learning_rate_at(2, 10, "cosine", 0, 1.0) > learning_rate_at(2, 10, "linear", 0, 1.0)
    assert learning_rate_at(1, 2, "linear", 5, 1.0) == pytest.approx(0.4)  # shorter than its warm-up


def group(task_id: str, *rewards: float) -> GroupStats:
    return GroupStats(group_id=f"g-{task_id}", task_id=task_id, rewards=rewards, num_survivors=len(rewards))


def test_tasks_that_teach_nothing_are_named() -> None:
    history = [
        group("known", 1, 1),
        group("known", 1, 1),
        group("hard", 0, 0),
        group("hard", 0, 0),
        group("useful", 0, 1),
        group("useful", 1, 1),
        group("partly", 0.5, 0.5),
    ]
    found = diagnose(history)
    assert (found.memorised, found.hopeless, found.num_tasks) == (["known"], ["hard"], 4)


def test_only_the_latest_groups_of_a_task_speak() -> None:
    history = [group("t", 0, 0), group("t", 0, 1), group("t", 1, 1), group("t", 1, 1)]
    assert diagnose(history).memorised == ["t"]
    assert diagnose(history, window=3).memorised == []
    assert diagnose(history[:1]).hopeless == ["t"]
    assert diagnose([]).num_tasks == 0


def test_success_is_what_the_caller_says_it_is() -> None:
    history = [group("t", 0.95, 0.9), group("u", 0.1, -1.0)]
    found = diagnose(history, success=0.9, failure=0.1)
    assert (found.memorised, found.hopeless) == (["t"], ["u"])


def test_further_tasks_of_a_step_are_others_the_same_whenever_asked_and_do_not_move_the_order() -> None:
    tasks = [Task(id=f"t{i}") for i in range(9)]
    order = TaskOrder(tasks, 3, seed=1)
    first = [task.id for task in order.tasks_at(4)]
    more = [task.id for task in order.refill_at(4, 0, 2, set(first))]
    assert len(set(first) | set(more)) == 5
    assert [task.id for task in order.tasks_at(5)] == [task.id for task in TaskOrder(tasks, 3, seed=1).tasks_at(5)]
    assert [task.id for task in TaskOrder(tasks[::-1], 3, seed=1).refill_at(4, 0, 2, set(first))] == more
    assert len(order.refill_at(4, 1, 9, {*first, *more})) == 4, "no more than there are"
    assert len({tuple(t.id for t in order.refill_at(step, 0, 4, ())) for step in range(5)}) > 1


def test_groups_asked_for_later_in_a_step_have_ids_and_seeds_of_their_own() -> None:
    tasks = [Task(id=f"t{i}") for i in range(2)]
    first = plan_step("run", 0, tasks, 2, {"main": 0})
    again = plan_step("run", 0, tasks, 2, {"main": 0}, first_place=2)
    for field in ("id", "group_id", "seed"):
        assert not {getattr(r, field) for r in first} & {getattr(r, field) for r in again}
