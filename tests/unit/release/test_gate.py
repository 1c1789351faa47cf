import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leyden.base.errors import RecordError
from leyden.base.records import Verdict
from leyden.release.evaluation import Evaluation, TaskResult
from leyden.release.gate import MCNEMAR, SIGN_FLIP, compare, explain


def evaluation(successes: Sequence[Sequence[float]], version: int = 0, **changes: Any) -> Evaluation:
    """An evaluation whose rewards are its successes; task k has `successes[k]`."""
    tasks = tuple(
        TaskResult(
            task_id=f"t{number:04}",
            domain="",
            rewards=tuple(values),
            successes=tuple(value > 0.5 for value in values),
            outcomes=("completed",) * len(values),
            components={},
            num_unscored=0,
            num_calls=1.0,
            completion_tokens=9.0,
            latency_s=None,
        )
        for number, values in enumerate(successes)
    )
    made: dict[str, Any] = {"fingerprint": "f", "split": "holdout", "success": "correct"}
    return Evaluation(policy_version=f"main@{version}", tasks=tasks, resamples=400, **{**made, **changes})


def pair(won: int, lost: int, both: int = 0, neither: int = 0) -> tuple[Evaluation, Evaluation]:
    ours = [[1.0]] * won + [[0.0]] * lost + [[1.0]] * both + [[0.0]] * neither
    theirs = [[0.0]] * won + [[1.0]] * lost + [[1.0]] * both + [[0.0]] * neither
    return evaluation(ours, 1), evaluation(theirs)


def test_a_clear_gain_is_better_and_a_clear_loss_is_worse() -> None:
    candidate, incumbent = pair(61, 12, 100, 92)
    verdict = compare(candidate, incumbent)
    assert (verdict.answer, verdict.test, verdict.num_tasks) == ("better", MCNEMAR, 265)
    assert verdict.difference == pytest.approx(49 / 265) and verdict.low > 0
    reverse = compare(incumbent, candidate)
    assert reverse.answer == "worse" and reverse.difference == -verdict.difference
    assert reverse.p_value == verdict.p_value


def test_equal_evaluations_are_not_separable_and_the_interval_is_not_empty() -> None:
    candidate, incumbent = pair(0, 0, 20, 20)
    verdict = compare(candidate, incumbent)
    assert (verdict.answer, verdict.p_value) == ("not separable", 1.0)
    assert verdict.low < 0 < verdict.high


def test_several_samples_per_task_are_compared_by_task_means() -> None:
    candidate = evaluation([[1.0, 1.0, 0.0, 1.0]] * 30, 1)
    verdict = compare(candidate, evaluation([[0.0, 1.0, 0.0, 0.0]] * 30))
    assert (verdict.test, verdict.answer) == (SIGN_FLIP, "better")
    assert verdict.difference == 0.5 and verdict.p_value == pytest.approx(2 * 0.5**30)


def test_rewards_can_be_compared_instead_of_successes() -> None:
    rng = np.random.default_rng(0)
    theirs = rng.normal(size=80)
    ours = theirs + 0.3 + 0.1 * rng.normal(size=80)
    verdict = compare(
        evaluation([[float(value)] for value in ours], 1),
        evaluation([[float(value)] for value in theirs]),
        metric="reward",
    )
    assert verdict.answer == "better" and verdict.test == SIGN_FLIP
    assert 0.2 < verdict.low < verdict.difference < verdict.high < 0.4
    assert explain(verdict).startswith("+0.") and " reward (" in explain(verdict)


def test_a_missing_reward_is_not_compared_as_zero() -> None:
    candidate, incumbent = pair(1, 0, 3)
    task = replace(candidate.tasks[0], rewards=(None,))
    broken = replace(candidate, tasks=(task, *candidate.tasks[1:]))
    with pytest.raises(RecordError, match=r"t0000.*without a reward"):
        compare(broken, incumbent, metric="reward")
    assert compare(broken, incumbent).num_tasks == 4


def test_a_task_without_a_rollout_that_counts_is_left_out_and_said() -> None:
    candidate, incumbent = pair(8, 0, 2)
    empty = replace(candidate.tasks[9], rewards=(), successes=(), outcomes=("infra_error",))
    verdict = compare(replace(candidate, tasks=(*candidate.tasks[:9], empty)), incumbent)
    assert (verdict.num_tasks, verdict.num_left_out) == (9, 1)
    assert "1 task left out" in explain(verdict)


def test_nothing_left_to_compare_is_an_error() -> None:
    with pytest.raises(RecordError, match="no task"):
        compare(evaluation([[]], 1), evaluation([[]]))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fingerprint": "g"}, "fingerprint 'f'.*'g'"),
        ({"split": "val"}, "split"),
        ({"success": ""}, "success"),
    ],
)
def test_evaluations_of_different_things_are_not_compared(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RecordError, match=named):
        compare(evaluation([[1.0]] * 3, 1), evaluation([[1.0]] * 3, **changes))


def test_different_tasks_are_named() -> None:
    with pytest.raises(RecordError, match=r"only the first has 't0002', only the second has none"):
        compare(evaluation([[1.0]] * 3, 1), evaluation([[1.0]] * 2))


def test_two_runs_of_one_policy_are_called_different_at_most_as_often_as_allowed() -> None:
    rng = np.random.default_rng(4)
    num_simulations, called = 2500, 0
    for _ in range(num_simulations):
        rates = rng.beta(0.5, 0.5, size=40)
        ours, theirs = ((rng.random(40) < rates).astype(float)[:, None].tolist() for _ in range(2))
        verdict = compare(evaluation(ours, 1), evaluation(theirs), level=0.9, resamples=100)
        called += verdict.answer != "not separable"
    # Two standard errors of 10 % in 2500 trials are 1.2 points; the exact test stays below 10 % by itself.
    assert 0.01 < called / num_simulations <= 0.1


def test_two_runs_of_one_policy_with_several_samples_are_not_called_different_too_often() -> None:
    rng = np.random.default_rng(6)
    num_simulations, called = 2000, 0
    for _ in range(num_simulations):
        rates = rng.beta(0.5, 0.5, size=24)
        ours, theirs = ((rng.random((24, 3)) < rates[:, None]).astype(float).tolist() for _ in range(2))
        verdict = compare(evaluation(ours, 1), evaluation(theirs), level=0.9, resamples=100)
        called += verdict.answer != "not separable"
    assert 0.03 < called / num_simulations <= 0.1


def test_a_verdict_reads_in_plain_words() -> None:
    candidate, incumbent = pair(61, 12, 100, 92)
    sentence = explain(compare(candidate, incumbent))
    assert sentence.startswith("+18.5 points (12.") and "61 tasks won, 12 lost of 265" in sentence
    assert sentence.endswith("p = 5e-9: better")


def test_a_verdict_that_cannot_separate_says_what_could_be_shown() -> None:
    candidate, incumbent = pair(9, 6, 40, 40)
    sentence = explain(compare(candidate, incumbent))
    assert "not separable; 95 tasks show a difference of 11." in sentence and "four times in five" in sentence
    assert "cannot show any difference" in explain(compare(*pair(1, 0)))


def test_a_bare_verdict_can_be_explained_too() -> None:
    bare = Verdict(
        answer="worse",
        candidate="a@2",
        incumbent="a@1",
        difference=-0.25,
        low=-0.4,
        high=-0.1,
        p_value=0.004,
        test=MCNEMAR,
        num_tasks=40,
    )
    assert explain(bare) == "-25.0 points (-40.0 to -10.0), 40 tasks compared, p = 0.004: worse"
    assert "no interval" in explain(replace(bare, low=-math.inf))
