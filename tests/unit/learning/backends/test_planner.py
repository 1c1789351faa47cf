"""The layout with the fewest predicted seconds, whatever the machine: a scripted clock says what passes cost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.learning.backends.tiny import gradients, make_batch, make_loaded, relative_difference

from leyden.base.config import LearnConfig
from leyden.learning.backends.base import Layout, Objective
from leyden.learning.backends.embedded import descent, planner
from leyden.learning.backends.embedded.layouts import plan_passes
from leyden.learning.backends.embedded.planner import CostModel, Planner, Shape, calibration_batch, features_of
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch, check
from leyden.step_report import update_numbers

SHAPE = Shape(num_parameters=1_000_000, num_layers=2, attention_width=32, head_size=64 * 32)


def grouped(num: int, prompt: int, answer: int) -> Batch:
    """`num` answers to one prompt."""
    rng = np.random.default_rng(num + prompt)
    shared = rng.integers(0, 60, prompt)
    rows = [(np.concatenate([shared, rng.integers(0, 60, answer)]).astype(np.int32), prompt) for _ in range(num)]
    return make_batch(rows, rng)


def unlike(length: int) -> Batch:
    """Two sequences without anything in common."""
    rows = [(np.asarray([i, *range(length - 1)], np.int32) % 60, length // 2) for i in range(2)]
    return make_batch(rows, np.random.default_rng(0))


def scripted(true_seconds: np.ndarray, budget: int = 4096) -> Planner:
    """A planner on a machine on which features cost exactly `true_seconds` each."""

    def clock(layout: Layout) -> float:
        return float(features_of(plan_passes(calibration_batch(), layout, budget)) @ true_seconds)

    return Planner("auto", budget, SHAPE, clock)


def run(one: Planner, batch: Batch, true_seconds: np.ndarray) -> Layout:
    """Plan a batch, and let the planner see what it cost."""
    plan = one.plan(batch)
    assert plan.features is not None
    one.measured(plan, float(plan.features @ true_seconds))
    return plan.layout


def test_what_is_shared_goes_through_the_tree_and_what_is_not_goes_where_attention_is_cheap() -> None:
    true = SHAPE.prior() * 1e-9
    true[3] *= 20  # this machine has slow tree attention
    one = scripted(true)
    assert run(one, grouped(8, 200, 10), true) == "tree"
    assert run(one, unlike(800), true) != "tree"


def test_a_machine_that_is_unlike_the_first_guess_is_learned_from_its_steps() -> None:
    true = SHAPE.prior() * 1e-9
    true[3] *= 300  # far from the prior, and hardly visible in the small calibration passes
    one = scripted(true)
    batch = unlike(600)
    predicted = {layout: float(features_of(plan_passes(batch, layout, 4096)) @ true) for layout in planner.CANDIDATES}
    best = min(predicted, key=lambda layout: predicted[layout])
    assert best != "tree"
    layouts = [run(one, batch, true) for _ in range(6)]
    assert predicted[layouts[-1]] <= predicted[best] * 1.1


@given(st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_predictions_come_near_measurements_of_a_machine_that_is_linear(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prior = SHAPE.prior()
    true = prior * 1e-9 * rng.uniform(0.3, 3.0, len(prior))
    costs = CostModel(prior)
    seen = [
        features_of(plan_passes(grouped(int(rng.integers(2, 9)), int(rng.integers(5, 200)), 20), layout, 4096))
        for layout in planner.CANDIDATES
        for _ in range(5)
    ]
    for features in seen:
        costs.measured(features, float(features @ true))
    for features in seen:
        assert costs.predict(features) == pytest.approx(float(features @ true), rel=0.1)
    assert (costs.coefficients >= 0).all()


def test_a_small_lead_does_not_leave_the_tree() -> None:
    true = SHAPE.prior() * 1e-9
    one = scripted(true)
    batch = unlike(60)
    assert run(one, batch, true) == "tree"
    tree, packed = (
        one.costs.predict(features_of(plan_passes(batch, layout, 4096))) for layout in planner.CANDIDATES[:2]
    )
    assert planner.MARGIN * tree < packed < tree


def several(num_tasks: int, prompt: int, num: int, answer: int) -> Batch:
    """Groups below one system prompt."""
    rng = np.random.default_rng(num_tasks)
    system = rng.integers(0, 60, prompt)
    rows = []
    for _ in range(num_tasks):
        question = np.concatenate([system, rng.integers(0, 60, prompt)])
        rows += [
            (np.concatenate([question, rng.integers(0, 60, answer)]).astype(np.int32), 2 * prompt) for _ in range(num)
        ]
    return make_batch(rows, rng)


def test_a_tree_above_the_budget_goes_depth_first_and_one_below_it_whole() -> None:
    true = SHAPE.prior() * 1e-9
    batch = several(4, 200, 4, 50)
    assert len(plan_passes(batch, "tree", 600)) > 1
    assert run(scripted(true, 600), batch, true) == "depth_first"
    assert run(scripted(true, 4096), batch, true) == "tree"


def test_a_machine_on_which_passes_are_dear_cuts_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = several(4, 200, 4, 50)
    num = {layout: len(plan_passes(batch, layout, 600)) for layout in ("tree", "depth_first")}
    assert num["depth_first"] > num["tree"]
    monkeypatch.setattr(planner, "PASS_TOKENS", 100 * descent.PASS_TOKENS)
    true = SHAPE.prior() * 1e-9
    assert run(scripted(true, 600), batch, true) == "tree"


def test_without_a_clock_the_first_choice_is_made_from_multiplications() -> None:
    one = Planner("auto", 4096, SHAPE)
    plan = one.plan(grouped(8, 100, 10))
    assert plan.layout == "tree" and plan.predicted_s is not None and plan.predicted_s > 0


def test_a_fixed_layout_is_planned_as_it_is_and_measures_nothing() -> None:
    def clock(layout: Layout) -> float:
        raise AssertionError("nothing has to be measured")

    one = Planner("packed", 4096, SHAPE, clock)
    plan = one.plan(grouped(2, 10, 5))
    one.measured(plan, 1.0)
    assert (plan.layout, plan.predicted_s, one.costs.num_measured) == ("packed", None, 0)


def test_the_calibration_batch_is_sound_and_costs_every_layout_the_same_tokens() -> None:
    batch = calibration_batch()
    check(batch)
    assert {layout: features_of(plan_passes(batch, layout, 4096))[0] for layout in planner.CANDIDATES} == {
        "tree": 8 * 47, "packed": 8 * 47, "padded": 8 * 47,
    }  # fmt: skip


def test_the_planned_gradient_is_that_of_the_tree_and_calibration_adds_nothing() -> None:
    loaded = make_loaded()
    loaded.model.to(torch.float64)
    batch = grouped(4, 12, 8)
    found = []
    for layout in ("tree", "auto"):
        trainer = Trainer(loaded, LearnConfig(layout=layout))
        trainer.accumulate(batch, Objective())
        trainer.accumulate(batch, Objective())  # gradients add up over batches
        found.append(gradients(loaded))
    assert relative_difference(found[1], found[0]) < 1e-9


def test_the_step_report_says_what_was_predicted_and_measured() -> None:
    trainer = Trainer(make_loaded(), LearnConfig(layout="auto"))
    batch = grouped(4, 30, 8)
    numbers = update_numbers(trainer.update([batch, batch], Objective()))
    assert numbers["layout"] and set(numbers["layout"].split(", ")) <= {*planner.CANDIDATES, "depth_first"}
    assert numbers["num_passes"] == 2
    assert numbers["passes_predicted_s"] > 0 and numbers["passes_measured_s"] > 0
    fixed = update_numbers(Trainer(make_loaded(), LearnConfig(layout="tree")).update([batch], Objective()))
    assert fixed["passes_predicted_s"] is None and fixed["layout"] == "tree" and fixed["passes_measured_s"] > 0
