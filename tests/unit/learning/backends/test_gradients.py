"""One gradient: single, padded, packed and tree agree for every surrogate and normalisation."""

import numpy as np
import pytest
import torch
from tests.unit.learning.backends.tiny import (
    gradients,
    make_batch,
    make_loaded,
    random_sequences,
    relative_difference,
)

from leyden.base.config import LearnConfig
from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch

LAYOUTS = ("single", "padded", "packed", "tree")
NORMALISATIONS = ("random", "rollout_mean", "token_mean", "call_mean", "constant")
OBJECTIVES = {
    "policy_gradient": Objective(surrogate="policy_gradient"),
    "ppo_clip": Objective(surrogate="ppo_clip", clip_low=0.1, clip_high=0.3),
    "nll": Objective(surrogate="nll"),
    "policy_gradient with kl and entropy": Objective(kl=0.3, entropy=0.2),
    "ppo_clip with kl and entropy, no importance": Objective(
        surrogate="ppo_clip", kl=0.1, entropy=0.05, importance_cap=0.0
    ),
}


def trainer_for(loaded: LoadedModel, layout: str, token_budget: int = 4096) -> Trainer:
    return Trainer(loaded, LearnConfig(layout=layout, token_budget=token_budget))


def gradient(
    loaded: LoadedModel, batch: Batch, objective: Objective, layout: str, token_budget: int = 4096
) -> tuple[float, dict[str, torch.Tensor]]:
    rng = np.random.default_rng(7)
    old_N = -np.abs(rng.normal(3.0, 1.0, batch.num_labels))
    reference_N = -np.abs(rng.normal(3.0, 1.0, batch.num_labels))
    loss = trainer_for(loaded, layout, token_budget).accumulate(
        batch, objective, logp_old_N=old_N, logp_reference_N=reference_N
    )
    return loss, gradients(loaded)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_layout_has_the_same_gradient_in_float64_and_float32(name: str, normalisation: str) -> None:
    loaded = make_loaded()
    rng = np.random.default_rng(len(name) * 10 + len(normalisation))
    batch = make_batch(random_sequences(rng, 12), rng, weights=normalisation)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-9)):
        loaded.model.to(dtype)
        loss, reference = gradient(loaded, batch, OBJECTIVES[name], "single")
        assert any(float(g.norm()) > 0 for g in reference.values())
        for layout in LAYOUTS[1:]:
            other_loss, other = gradient(loaded, batch, OBJECTIVES[name], layout)
            assert abs(other_loss - loss) <= tolerance * max(1.0, abs(loss)), layout
            assert relative_difference(other, reference) < tolerance, (layout, dtype)
