"""One gradient: single, padded, packed, tree and depth_first agree for every surrogate and normalisation."""

import dataclasses

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
from leyden.learning.backends.embedded import descent
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch

LAYOUTS = ("single", "padded", "packed", "tree", "depth_first")
NORMALISATIONS = ("random", "rollout_mean", "token_mean", "call_mean", "constant")
OBJECTIVES = {
    "policy_gradient": Objective(surrogate="policy_gradient"),
    "ppo_clip": Objective(surrogate="ppo_clip", clip_low=0.1, clip_high=0.3),
    "nll": Objective(surrogate="nll"),
    "policy_gradient with kl and entropy": Objective(kl=0.3, entropy=0.2),
    "ppo_clip with kl and entropy, no importance": Objective(
        surrogate="ppo_clip", kl=0.1, entropy=0.05, importance_cap=0.0
    ),
    "ppo_clip with a second bound": Objective(surrogate="ppo_clip", clip_dual=1.5),
    "cispo": Objective(surrogate="cispo", clip_low=0.5, clip_high=1.0),
    "gspo": Objective(surrogate="gspo", clip_low=0.05, clip_high=0.05),
    "dpo": Objective(surrogate="dpo", dpo_beta=0.3),
    "importance and mask of whole calls": Objective(importance_level="sequence", importance_mask=50.0),
    "recorded old log-probs": Objective(surrogate="ppo_clip", old_logprobs="recorded"),
    "a critic": Objective(surrogate="ppo_clip", value_coef=0.5, value_clip=0.2),
}


def trainer_for(loaded: LoadedModel, layout: str, token_budget: int = 4096, *, critic: bool = False) -> Trainer:
    algorithm = "ppo" if critic else "grpo"
    trainer = Trainer(loaded, LearnConfig(algorithm=algorithm, layout=layout, token_budget=token_budget))
    if trainer.critic:
        weight = trainer.critic.out.weight
        trainer.critic.to(next(loaded.model.parameters()).dtype)
        with torch.no_grad():
            weight.copy_(torch.linspace(-0.3, 0.3, weight.numel()).reshape(weight.shape))
    return trainer


def completed(batch: Batch, objective: Objective) -> Batch:
    """With the arrays that a critic or pairs need."""
    rng = np.random.default_rng(3)
    num = len(batch.sequences)
    if objective.value_coef:
        target_A = np.where(rng.random(num) < 0.2, np.nan, rng.normal(size=num)).astype(np.float32)
        return dataclasses.replace(batch, target_A=target_A, value_A=rng.normal(size=num).astype(np.float32))
    if objective.surrogate == "dpo":
        pair_A = (batch.rollout_A // 2).astype(np.int32)
        side_N = np.where(batch.rollout_A[batch.action_N] % 2, -1.0, 1.0)
        return dataclasses.replace(batch, pair_A=pair_A, credit_N=side_N.astype(np.float32))
    return batch


def gradient(
    loaded: LoadedModel, batch: Batch, objective: Objective, layout: str, token_budget: int = 4096
) -> tuple[float, dict[str, torch.Tensor]]:
    rng = np.random.default_rng(7)
    old_N = -np.abs(rng.normal(3.0, 1.0, batch.num_labels))
    reference_N = -np.abs(rng.normal(3.0, 1.0, batch.num_labels))
    if objective.old_logprobs == "recorded":
        old_N = batch.logp_sampler_N.astype(np.float64)
    trainer = trainer_for(loaded, layout, token_budget, critic=objective.value_coef != 0)
    loss = trainer.accumulate(completed(batch, objective), objective, logp_old_N=old_N, logp_reference_N=reference_N)
    found = gradients(loaded)
    if trainer.critic:
        for name, parameter in trainer.critic.named_parameters("critic"):
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0
            found[name] = parameter.grad
    return loss, found


# Weights enter every surrogate in the same way, so the newer ones are tried with two normalisations only.
CASES = [
    (name, normalisation)
    for place, name in enumerate(OBJECTIVES)
    for normalisation in (NORMALISATIONS if place < 5 else ("random", "rollout_mean"))
]


@pytest.mark.parametrize(("name", "normalisation"), CASES)
def test_every_layout_has_the_same_gradient_in_float64_and_float32(
    name: str, normalisation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descent, "PASS_TOKENS", 0)  # tiny trunks are passes too
    loaded = make_loaded()
    rng = np.random.default_rng(len(name) * 10 + len(normalisation))
    batch = make_batch(random_sequences(rng, 12), rng, weights=normalisation)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-9)):
        loaded.model.to(dtype)
        loss, reference = gradient(loaded, batch, OBJECTIVES[name], "single")
        assert any(float(g.norm()) > 0 for g in reference.values())
        for layout in LAYOUTS[1:]:
            budget = 24 if layout == "depth_first" or (layout == "tree" and dtype == torch.float64) else 4096
            other_loss, other = gradient(loaded, batch, OBJECTIVES[name], layout, budget)
            assert abs(other_loss - loss) <= tolerance * max(1.0, abs(loss)), layout
            assert relative_difference(other, reference) < tolerance, (layout, dtype)
