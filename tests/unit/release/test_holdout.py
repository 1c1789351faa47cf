from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.base.errors import HoldoutError
from leyden.base.records import Rollout, Task
from leyden.release import holdout

TASKS = [Task(id=f"t{number}", split="holdout", input={"question": str(number)}) for number in range(8)]


def test_training_on_a_holdout_task_is_refused_by_name() -> None:
    with pytest.raises(HoldoutError, match=r"'t0'.*and 3 more"):
        holdout.guard(TASKS, "train")
    with pytest.raises(HoldoutError, match="mode 'val'"):
        holdout.guard([Task(id="a"), TASKS[3]], "train")


def test_evaluating_the_holdout_and_training_on_the_rest_are_allowed() -> None:
    holdout.guard(TASKS, "val")
    holdout.guard([Task(id="a"), Task(id="b", split="val")], "train")


@given(st.permutations(TASKS))
def test_the_fingerprint_does_not_depend_on_the_order(tasks: list[Task]) -> None:
    assert holdout.fingerprint(tasks) == holdout.fingerprint(TASKS)


def test_the_fingerprint_changes_with_anything_that_is_asked_or_checked() -> None:
    base = Task(id="a", split="holdout", domain="d", input={"q": 1}, answer="x")
    others = [
        Task(id="b", split="holdout", domain="d", input={"q": 1}, answer="x"),
        Task(id="a", split="val", domain="d", input={"q": 1}, answer="x"),
        Task(id="a", split="holdout", domain="e", input={"q": 1}, answer="x"),
        Task(id="a", split="holdout", domain="d", input={"q": 2}, answer="x"),
        Task(id="a", split="holdout", domain="d", input={"q": 1}, answer="y"),
    ]
    assert len({holdout.fingerprint([task]) for task in [base, *others]}) == 6


@dataclass(frozen=True)
class Recorded:
    run_id: str | None


def test_a_run_is_one_look_and_so_is_an_evaluation_without_a_run() -> None:
    assert holdout.looks([]) == 0
    assert holdout.looks([Recorded("a"), Recorded("a"), Recorded("b"), Recorded(None), Recorded(None)]) == 4


def test_the_cost_of_several_looks_is_said() -> None:
    assert "first time" in holdout.sentence(1, 0.95)
    assert "from 0.05 to as much as 0.2;" in holdout.sentence(4, 0.95)


def test_rollouts_are_guarded_in_their_own_mode() -> None:
    holdout.guard([Rollout(id="r", task=TASKS[0], mode="val"), Rollout(id="s", task=Task(id="a"))])
    with pytest.raises(HoldoutError, match="'t0'"):
        holdout.guard([Rollout(id="r", task=TASKS[0], mode="train")])
