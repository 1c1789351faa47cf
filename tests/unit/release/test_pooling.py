"""Several runs of one method: every rollout counts once, at its task."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.release.making import evaluation

from leyden.base.errors import RecordError
from leyden.release.pooling import pooled, spread
from leyden.release.side_by_side import Method, side_by_side

RUNS = st.lists(
    st.lists(st.lists(st.booleans().map(float), min_size=1, max_size=3), min_size=4, max_size=4), min_size=1, max_size=4
)


@given(RUNS)
def test_success_of_a_pool_is_that_of_all_its_rollouts_at_each_task(runs: list[list[list[float]]]) -> None:
    found = pooled([evaluation(one, number) for number, one in enumerate(runs)])
    by_task = [[value for one in runs for value in one[k]] for k in range(4)]
    assert [list(map(float, task.successes)) for task in found.tasks] == by_task
    assert found.pass1.mean == pytest.approx(sum(sum(v) / len(v) for v in by_task) / 4)
    assert sum(task.num_counted for task in found.tasks) == sum(len(values) for one in runs for values in one)


def test_costs_of_a_pool_are_means_over_rollouts_and_unknown_where_a_run_does_not_know_them() -> None:
    one = evaluation([[1.0], [0.0, 1.0]], 1, tokens=[10.0, 20.0], usd=1.0, latency_s=2.0)
    two = evaluation([[1.0, 1.0, 0.0], [1.0]], 2, tokens=[30.0, 40.0], usd=None, latency_s=4.0)
    first, second = pooled([one, two]).tasks
    assert first.completion_tokens == pytest.approx((10 * 1 + 30 * 3) / 4)
    assert second.completion_tokens == pytest.approx((20 * 2 + 40 * 1) / 3)
    assert first.latency_s == pytest.approx((2 + 4 * 3) / 4)
    assert first.usd is None


def test_a_task_at_which_nothing_counted_in_one_run_is_what_the_others_say() -> None:
    found = pooled([evaluation([[], [1.0]], 1, tokens=5.0), evaluation([[0.0], [1.0]], 2, tokens=7.0)])
    assert found.tasks[0].completion_tokens == 7.0 and found.tasks[0].successes == (False,)
    assert found.num_excluded == 1


@pytest.mark.parametrize(
    "changes", [{"fingerprint": "other"}, {"success": "safe"}, {"split": "val"}, {"sampling": {"temperature": 1.0}}]
)
def test_runs_that_do_not_belong_together_are_refused(changes: dict[str, object]) -> None:
    one, two = evaluation([[1.0]], 1), evaluation([[1.0]], 2)
    with pytest.raises(RecordError, match=f"differ in {next(iter(changes))}"):
        pooled([one, replace(two, **changes)])  # type: ignore[arg-type]
    with pytest.raises(RecordError, match="a version is named twice"):
        pooled([one, one])


def test_the_page_says_how_far_runs_lie_apart_and_how_many_beat_the_reference() -> None:
    base = evaluation([[1.0]] * 10 + [[0.0]] * 30, 0)
    runs = tuple(evaluation([[1.0]] * n + [[0.0]] * (40 - n), k + 1) for k, n in enumerate((30, 32, 9)))
    assert spread("RL", runs, base).startswith("RL stands for 3 runs, which solved 75.0, 80.0, 22.5 %; 2 of them more")
    found = side_by_side(
        [Method(name="base", evaluation=base), Method(name="RL", evaluation=pooled(runs), runs=runs)], alpha=0.05
    )
    assert any("RL stands for 3 runs" in note for note in found.notes)
    assert found.rows[1].pass1.mean == pytest.approx((30 + 32 + 9) / 120)
