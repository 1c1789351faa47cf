"""Cuts are the cheapest ones: against every possible way to cut, and through the gradient."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.learning.backends.tiny import gradients, make_batch, make_loaded, relative_difference

from leyden.base.config import LearnConfig
from leyden.learning.backends.base import Layout, Objective
from leyden.learning.backends.embedded.layouts import plan_passes
from leyden.learning.backends.embedded.partition import partition
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.traces.forest import build_forest

LAYOUTS: tuple[Layout, ...] = ("tree", "packed", "padded")
rows = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=7)


def tokens_of(layout: Layout, run: list[tuple[int, ...]]) -> int:
    """Tokens of one pass over sorted inputs, by definition."""
    if layout == "tree":
        return len(build_forest([np.asarray(row, np.int32) for row in run]).tokens_U)
    own = [row for i, row in enumerate(run) if not any(other[: len(row)] == row for other in run[i + 1 :])]
    return sum(map(len, own)) if layout == "packed" else len(own) * max(map(len, own))


def shared_of(inputs: list[tuple[int, ...]]) -> np.ndarray:
    found = [0]
    for one, other in itertools.pairwise(inputs):
        found.append(
            next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        )
    return np.asarray(found, np.int64)


def every_way(num: int) -> list[list[slice]]:
    ways = []
    for borders in itertools.product((False, True), repeat=num - 1):
        cuts = [0, *(i + 1 for i, cut in enumerate(borders) if cut), num]
        ways.append([slice(a, b) for a, b in itertools.pairwise(cuts)])
    return ways


@given(rows, st.sampled_from(LAYOUTS), st.integers(1, 30))
@settings(max_examples=150, deadline=None)
def test_no_other_cuts_of_the_same_order_are_cheaper(sequences: list[list[int]], layout: Layout, budget: int) -> None:
    inputs = sorted(tuple(row) for row in sequences)
    found = partition(layout, budget, [len(row) for row in inputs], shared_of(inputs))
    assert [i for run in found for i in range(run.start, run.stop)] == list(range(len(inputs)))

    def cost(way: list[slice]) -> tuple[int, int] | None:
        tokens = [tokens_of(layout, inputs[run]) for run in way]
        sizes = [run.stop - run.start for run in way]
        if any(t > budget and size > 1 for t, size in zip(tokens, sizes, strict=True)):
            return None
        return (len(way), sum(tokens)) if layout == "padded" else (sum(tokens), len(way))

    best = min(c for c in map(cost, every_way(len(inputs))) if c is not None)
    assert cost(found) == best


def two_levels() -> list[tuple[np.ndarray, int]]:
    """A system prompt of 20, two questions of 10 and 2 tokens below it, three answers of 6 each."""
    rng = np.random.default_rng(3)
    system = rng.integers(0, 60, 20)
    prompts = [np.concatenate([system, rng.integers(0, 60, question)]) for question in (10, 2)]
    return [
        (np.concatenate([prompt, rng.integers(0, 60, 6)]).astype(np.int32), len(prompt))
        for prompt in prompts
        for _ in range(3)
    ]


def test_a_tree_is_cut_between_its_questions_where_only_the_system_prompt_is_computed_again() -> None:
    batch = make_batch(two_levels(), np.random.default_rng(0))
    # Filling the budget would cut behind the fourth answer, inside a question, and compute that one again as well.
    passes = plan_passes(batch, "tree", 55)
    assert sorted(p.num_tokens for p in passes) == [20 + 2 + 3 * 5, 20 + 10 + 3 * 5]


@pytest.mark.parametrize("budget", [25, 37, 46, 60])
def test_a_split_tree_has_the_gradient_of_the_whole_one(budget: int) -> None:
    loaded = make_loaded()
    loaded.model.to(torch.float64)
    batch = make_batch(two_levels(), np.random.default_rng(0))
    found = []
    for limit in (4096, budget):
        trainer = Trainer(loaded, LearnConfig(layout="tree", token_budget=limit))
        loss = trainer.accumulate(batch, Objective(surrogate="ppo_clip"))
        found.append((loss, gradients(loaded)))
    assert len(plan_passes(batch, "tree", budget)) > 1
    assert abs(found[0][0] - found[1][0]) < 1e-12
    assert relative_difference(found[1][1], found[0][1]) < 1e-9


def test_many_inputs_are_cut_in_time() -> None:
    num = 20_000
    runs = partition("tree", 4096, [300] * num, np.asarray([0, *[280] * (num - 1)], np.int64))
    assert sum(run.stop - run.start for run in runs) == num
