from dataclasses import dataclass

import pytest

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


@dataclass(frozen=True)
class Recorded:
    run_id: str | None


def test_a_run_is_one_look_and_so_is_an_evaluation_without_a_run() -> None:
    assert holdout.looks([]) == 0
    assert holdout.looks([Recorded("a"), Recorded("a"), Recorded("b"), Recorded(None), Recorded(None)]) == 4


def test_a_run_keeps_the_number_of_its_look_and_a_new_one_is_the_next() -> None:
    seen = [Recorded("a"), Recorded("b"), Recorded(None), Recorded("a"), Recorded("b")]
    assert [holdout.look_of(seen, run) for run in ("a", "b", "c", None)] == [1, 2, 4, 4]
    assert holdout.look_of([], "a") == 1


@pytest.mark.parametrize("planned", [0, 1, 4])
def test_all_looks_together_spend_no_more_than_the_error_rate(planned: int) -> None:
    spent = sum(1 - holdout.level_at(look, 0.95, planned) for look in range(1, 5000))
    assert spent <= 0.05 + 1e-9 and spent > 0.049


def test_what_a_look_may_claim_is_said() -> None:
    assert "first time" in holdout.sentence(1) and "0.025" in holdout.sentence(1)
    assert "look 4" in holdout.sentence(4) and "0.0025" in holdout.sentence(4) and "fresh" in holdout.sentence(4)
    assert "1 of 5 planned looks" in holdout.sentence(2, planned=5) and "0.01" in holdout.sentence(2, planned=5)
    assert "nothing more can be claimed" in holdout.sentence(6, planned=5)


def test_rollouts_are_guarded_in_their_own_mode() -> None:
    holdout.guard([Rollout(id="r", task=TASKS[0], mode="val"), Rollout(id="s", task=Task(id="a"))])
    with pytest.raises(HoldoutError, match="'t0'"):
        holdout.guard([Rollout(id="r", task=TASKS[0], mode="train")])
