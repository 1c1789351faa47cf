"""Several versions on the same tasks."""

import json
import math
from typing import Any

import numpy as np
import pytest
from tests.unit.release.making import evaluation

from leyden.base.errors import RecordError
from leyden.release.gate import compare
from leyden.release.side_by_side import Method, SideBySide, Training, side_by_side


def solved(count: int, of: int = 100) -> list[list[float]]:
    return [[1.0]] * count + [[0.0]] * (of - count)


def method(name: str, count: int, *, minutes: float = 0.0, usd: float | None = None, **more: Any) -> Method:
    found = evaluation(solved(count), **more)
    return Method(name=name, evaluation=found, training=Training(minutes=minutes, usd=usd))


def four(**more: Any) -> SideBySide:
    methods = [
        method("base", 20),
        method("prompt", 60, minutes=2, version=1),
        method("sft", 61, minutes=10, version=2),
        method("rl", 63, minutes=60, version=3),
    ]
    return side_by_side(methods, **more)


def test_the_cheapest_whose_gain_is_not_separable_from_the_best_is_recommended() -> None:
    found = four()
    assert found.recommended == "prompt" and found.unit == "minutes"
    assert "cheapest (by training time" in found.reason and "best by mean is rl" in found.reason
    assert {(p.first, p.second): p.verdict.answer for p in found.pairs} == {
        ("prompt", "base"): "better", ("sft", "base"): "better", ("rl", "base"): "better",
        ("sft", "prompt"): "not separable", ("rl", "prompt"): "not separable", ("rl", "sft"): "not separable",
    }  # fmt: skip


def test_a_dearer_version_that_is_separably_better_is_recommended() -> None:
    found = side_by_side([method("base", 20), method("cheap", 40, minutes=1), method("dear", 90, minutes=99)])
    assert found.recommended == "dear"
    only = side_by_side([method("base", 20), method("same", 21, minutes=1), method("dear", 90, minutes=99)])
    assert only.recommended == "dear" and "only version" in only.reason


def test_nothing_separable_keeps_the_reference_and_says_so() -> None:
    found = side_by_side([method("base", 50), method("sft", 52, minutes=5)])
    assert found.recommended == "base"
    assert "No version is separable from any other" in found.reason and "not a proof" in found.reason
    assert any("Nothing is separable on 100 tasks" in note for note in found.notes)
    worse = side_by_side([method("base", 80), method("sft", 20)])
    assert worse.recommended == "base" and "separably better than base" in worse.reason


def test_a_holdout_of_three_tasks_says_what_it_cannot_show() -> None:
    methods = [Method(name=n, evaluation=evaluation([[v]] * 3)) for n, v in (("a", 0.0), ("b", 1.0), ("c", 1.0))]
    found = side_by_side(methods)
    assert found.recommended == "a" and all(p.verdict.answer == "not separable" for p in found.pairs)
    assert "3 tasks with 3 pairs cannot show any difference" in found.notes[0]
    # 2^(1 - n) < 0.05 / 3 holds from n = 7 on.
    assert "at least 7 tasks" in found.notes[0]


def test_answers_are_corrected_for_all_pairs() -> None:
    # 12 won, 3 lost: p = 0.035 alone, which three pairs do not leave.
    ours = [[1.0]] * 12 + [[0.0]] * 3 + [[1.0]] * 45
    theirs = [[0.0]] * 12 + [[1.0]] * 3 + [[1.0]] * 45
    candidate, incumbent = evaluation(ours, 1), evaluation(theirs)
    assert compare(candidate, incumbent).answer == "better"
    names = [Method(name="a", evaluation=incumbent), Method(name="b", evaluation=candidate)]
    assert side_by_side(names).pairs[0].verdict.answer == "better"
    three = side_by_side([*names, Method(name="c", evaluation=evaluation(ours, 2))])
    first = three.pairs[0]
    assert first.verdict.p_value == pytest.approx(0.0352, abs=1e-4)
    assert first.adjusted_p == pytest.approx(3 * first.verdict.p_value)
    assert first.verdict.answer == "not separable"


def test_among_equal_versions_a_false_claim_is_at_most_as_likely_as_alpha() -> None:
    rng = np.random.default_rng(11)
    num_false, num_simulations = 0, 300
    for _ in range(num_simulations):
        rates = rng.beta(0.5, 0.5, size=30)
        methods = [
            Method(
                name=str(v),
                evaluation=evaluation((rng.random(30) < rates).astype(float)[:, None].tolist(), v, resamples=100),
            )
            for v in range(4)
        ]
        num_false += any(p.verdict.answer != "not separable" for p in side_by_side(methods, alpha=0.2).pairs)
    # Three standard errors of 20 % in 300 trials are 7 points.
    assert num_false / num_simulations <= 0.2 + 0.07


def test_money_decides_where_it_is_known_and_the_month_is_projected() -> None:
    found = side_by_side(
        [
            Method(
                name="base", evaluation=evaluation(solved(20), usd=0.001, num_calls=2.0), training=Training(usd=0.0)
            ),
            Method(name="big", evaluation=evaluation(solved(70), 1, usd=0.05), training=Training(usd=1.0)),
            Method(name="own", evaluation=evaluation(solved(68), 2, usd=0.0005), training=Training(usd=40.0)),
        ],
        calls_per_month=20_000,
    )
    assert found.unit == "usd" and found.tasks_per_month == pytest.approx(10_000)
    base, big, own = found.rows
    assert base.monthly_usd is not None and base.monthly_usd.mean == pytest.approx(10)
    assert big.monthly_usd is not None and big.monthly_usd.mean == pytest.approx(500)
    assert own.monthly_added is not None and own.monthly_added.mean == pytest.approx(4800)
    assert big.per_success is not None and big.per_success.value == pytest.approx((1 + 490) / 5000)
    assert own.per_success is not None and own.per_success.value == pytest.approx((40 - 5) / 4800)
    assert found.recommended == "own" and "training and running cost" in found.reason
    # With hardly any work the training does not pay.
    few = side_by_side(
        [Method(name=r.name, evaluation=m, training=r.training) for r, m in zip(
            found.rows, (evaluation(solved(20), usd=0.001), evaluation(solved(70), 1, usd=0.05),
                         evaluation(solved(68), 2, usd=0.0005)), strict=True)],
        calls_per_month=100,
    )  # fmt: skip
    assert few.recommended == "big"


def test_what_is_not_known_is_none_and_said() -> None:
    found = four()
    assert found.rows[1].axes["usd"].num_tasks == 0 and found.rows[1].monthly_usd is None
    assert [one.axis for one in found.fronts] == ["tokens", "latency_s"]
    assert any("Money per rollout is not known" in note for note in found.notes)


def test_different_sampling_and_lost_tasks_are_said() -> None:
    left = evaluation([*solved(40)[:-1], []], 1, sampling={"temperature": 0.0})
    right = evaluation(solved(40), sampling={"temperature": 1.0})
    notes = side_by_side([Method(name="a", evaluation=right), Method(name="b", evaluation=left)]).notes
    assert any("sampled differently" in note for note in notes)
    assert any("1 tasks have no rollout that counts" in note for note in notes)
    assert any("1 rollouts of b do not count" in note for note in notes)


def test_a_spent_holdout_claims_nothing() -> None:
    found = side_by_side([method("base", 5), method("sft", 95, version=1)], alpha=0.0)
    assert found.pairs[0].verdict.answer == "not separable" and found.recommended == "base"
    assert "used up" in found.notes[0]


@pytest.mark.parametrize(
    ("methods", "complaint"),
    [
        ([method("base", 5)], "at least two"),
        ([method("a", 5), method("a", 6)], "'a' is named twice"),
        ([method("a", 5), method("b", 6, fingerprint="g")], "fingerprint"),
        ([method("a", 5), Method(name="b", evaluation=evaluation(solved(1, of=5)))], "different tasks"),
    ],
)
def test_what_cannot_be_compared_is_refused(methods: list[Method], complaint: str) -> None:
    with pytest.raises(RecordError, match=complaint):
        side_by_side(methods)
    with pytest.raises(RecordError, match="calls per month"):
        side_by_side([method("a", 1), method("b", 2)], calls_per_month=-1)


def test_the_json_form_is_plain_and_has_no_infinity() -> None:
    tree = json.loads(json.dumps(four(calls_per_month=100).to_json(), allow_nan=False))
    assert tree["recommended"] == "prompt" and len(tree["pairs"]) == 6
    assert tree["rows"][0]["added"] is None and tree["rows"][1]["per_success"]["value"] is not None
    assert math.isclose(tree["rows"][3]["added"]["mean"], 0.43)
