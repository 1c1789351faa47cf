"""A whole run of optimizer steps: every layout learns along the same curve, to the rounding of floating point."""

import numpy as np
import pytest
import torch
from tests.unit.learning.backends.tiny import make_batch, make_loaded, random_sequences

from leyden.base.config import LearnConfig
from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded import descent
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch

STEPS = 6
OBJECTIVE = Objective(
    surrogate="ppo_clip", kl=0.05, entropy=0.01, learning_rate=0.01, grad_clip=1.0, importance_cap=2.0
)


def batches(step: int) -> list[Batch]:
    """Two optimizer steps of one update; its second meets ratios that are not 1."""
    rng = np.random.default_rng(step)
    batch = make_batch(random_sequences(rng, 10), rng, weights="rollout_mean", unknown=0.0)
    return [batch, batch]


def curve(layout: str, dtype: torch.dtype, budget: int) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """(loss, gradient norm, KL and entropy of each update; shape (STEPS, 4), parameters after the last)."""
    loaded = make_loaded()
    loaded.model.to(dtype)
    learn = LearnConfig(layout=layout, token_budget=budget, weight_decay=0.01)
    trainer = Trainer(loaded, learn)
    rows = []
    for step in range(STEPS):
        report = trainer.update(batches(step), OBJECTIVE)
        rows.append((report.loss, report.grad_norm, report.kl, report.entropy))
    return np.asarray(rows), {name: p.detach().clone() for name, p in loaded.trainable().items()}


@pytest.fixture(scope="module")
def of_padded() -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """The curve that all others are compared with."""
    return curve("padded", torch.float64, 4096)


@pytest.mark.parametrize(("layout", "budget"), [("tree", 4096), ("tree", 30), ("depth_first", 30), ("packed", 4096)])
def test_every_layout_learns_along_the_curve_of_padded_rows(
    layout: str,
    budget: int,
    of_padded: tuple[np.ndarray, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(descent, "PASS_TOKENS", 0)
    expected, reached = of_padded
    assert np.ptp(expected[:, 3]) > 0.1, "nothing was learned"
    found, weights = curve(layout, torch.float64, budget)
    # Adam divides by the root of squares that may be as small as its eps, which magnifies rounding.
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-9)
    for name, weight in weights.items():
        assert torch.allclose(weight, reached[name], rtol=1e-5, atol=1e-7), name


def test_in_float32_tree_and_padded_agree_to_its_rounding() -> None:
    expected, _ = curve("padded", torch.float32, 4096)
    found, _ = curve("tree", torch.float32, 4096)
    assert np.allclose(found, expected, rtol=1e-2, atol=1e-4)
