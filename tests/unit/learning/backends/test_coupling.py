"""Losses over whole calls and pairs, and the critic: against autograd through all of a batch at once."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.learning.backends.test_trainer import plain_logprobs, some_batch
from tests.unit.learning.backends.tiny import gradients, make_loaded, relative_difference

from leyden.base.config import LearnConfig, LoraConfig
from leyden.base.errors import CheckpointError, LearningError
from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded import checkpoint
from leyden.learning.backends.embedded.model import LoadedModel, load_model
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch

LAYOUTS = ("single", "padded", "packed", "tree", "depth_first")


def doubled() -> LoadedModel:
    loaded = make_loaded()
    loaded.model.double()
    return loaded


def by_action(values_N: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
    return [values_N[torch.from_numpy(np.flatnonzero(batch.action_N == a))] for a in range(len(batch.sequences))]


def per_call(batch: Batch, seed: int = 1) -> Batch:
    """Credit and weight equal over the labels of each call, as a batch of the loop has them."""
    rng = np.random.default_rng(seed)
    credit_A, weight_A = rng.normal(size=len(batch.sequences)), rng.uniform(0.1, 1, len(batch.sequences))
    return dataclasses.replace(
        batch,
        credit_N=credit_A[batch.action_N].astype(np.float32),
        weight_N=weight_A[batch.action_N].astype(np.float32),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gspo_has_the_gradient_of_the_sequence_objective_of_its_paper(layout: str) -> None:
    loaded, batch = doubled(), per_call(some_batch())
    logp_N = plain_logprobs(loaded, batch)
    old_N = logp_N.detach() + torch.from_numpy(np.random.default_rng(2).normal(0, 0.3, batch.num_labels))
    loss = torch.zeros((), dtype=torch.float64)
    for a, difference in enumerate(by_action(logp_N - old_N, batch)):
        if len(difference):
            mine = np.flatnonzero(batch.action_N == a)
            credit, weight = float(batch.credit_N[mine[0]]), float(batch.weight_N[mine].astype(np.float64).sum())
            s = torch.exp(difference.mean())
            loss = loss - weight * torch.minimum(s * credit, s.clamp(0.9, 1.1) * credit)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = gradients(loaded)
    objective = Objective(surrogate="gspo", clip_low=0.1, clip_high=0.1, importance_cap=0.0)
    trainer = Trainer(loaded, LearnConfig(layout=layout, token_budget=40))
    found = trainer.accumulate(batch, objective, logp_old_N=old_N.numpy())
    assert found == pytest.approx(float(loss.detach()), rel=1e-6)
    assert relative_difference(gradients(loaded), expected) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dpo_has_the_loss_and_the_gradient_of_its_paper_over_all_calls_of_both_rollouts(layout: str) -> None:
    loaded, batch = doubled(), some_batch()
    pair_A = (batch.rollout_A // 2).astype(np.int32)
    side_N = np.where(batch.rollout_A[batch.action_N] % 2, -1.0, 1.0)
    num_pairs = int(pair_A.max()) + 1
    weight_N = np.full(batch.num_labels, 1 / num_pairs, np.float32)
    batch = dataclasses.replace(batch, pair_A=pair_A, credit_N=side_N.astype(np.float32), weight_N=weight_N)
    logp_N = plain_logprobs(loaded, batch)
    reference_N = logp_N.detach() + torch.from_numpy(np.random.default_rng(2).normal(0, 0.3, batch.num_labels))
    loss = torch.zeros((), dtype=torch.float64)
    for p in range(num_pairs):
        mine = torch.from_numpy((pair_A[batch.action_N] == p) * side_N)
        loss = loss - torch.nn.functional.logsigmoid(0.3 * (mine * (logp_N - reference_N)).sum()) / num_pairs
    loss.backward()  # type: ignore[no-untyped-call]
    expected = gradients(loaded)
    trainer = Trainer(loaded, LearnConfig(algorithm="dpo", layout=layout, token_budget=40))
    objective = Objective(surrogate="dpo", dpo_beta=0.3)
    found = trainer.accumulate(batch, objective, logp_reference_N=reference_N.numpy())
    assert found == pytest.approx(float(loss.detach()), rel=1e-6)
    assert relative_difference(gradients(loaded), expected) < 1e-6


def test_a_preference_step_starts_at_log_two_and_widens_the_margin() -> None:
    batch = some_batch()
    pair_A = (batch.rollout_A // 2).astype(np.int32)
    side_N = np.where(batch.rollout_A[batch.action_N] % 2, -1.0, 1.0).astype(np.float32)
    weight_N = np.full(batch.num_labels, 1 / (int(pair_A.max()) + 1), np.float32)
    batch = dataclasses.replace(batch, pair_A=pair_A, credit_N=side_N, weight_N=weight_N)
    trainer = Trainer(make_loaded(), LearnConfig(algorithm="dpo"))
    objective = Objective(surrogate="dpo", dpo_beta=0.3, learning_rate=0.01)
    first = trainer.update([batch], objective)
    assert first.loss == pytest.approx(np.log(2), rel=1e-4) and first.pair_margin == pytest.approx(0, abs=1e-4)
    second = trainer.update([batch, batch], objective)
    assert second.num_optimizer_steps == 2 and second.pair_margin > 0.1 and second.pair_accuracy == 1.0


def test_importance_of_whole_calls_is_the_product_over_their_tokens() -> None:
    loaded, batch = doubled(), some_batch()
    logp_N = plain_logprobs(loaded, batch)
    sampler_N = torch.from_numpy(batch.logp_sampler_N.astype(np.float64))
    log_N = (logp_N.detach() - sampler_N).nan_to_num(nan=0.0)
    product_N = torch.empty_like(log_N)
    for a, logs in enumerate(by_action(log_N, batch)):
        product_N[torch.from_numpy(batch.action_N == a)] = logs.sum().exp().clamp(max=1.5)
    scale_N = torch.from_numpy(batch.weight_N * batch.credit_N.astype(np.float64))
    (-(scale_N * product_N * logp_N)).sum().backward()  # type: ignore[no-untyped-call]
    expected = gradients(loaded)
    trainer = Trainer(loaded, LearnConfig())
    objective = Objective(importance_level="sequence", importance_cap=1.5)
    trainer.accumulate(batch, objective, logp_old_N=logp_N.detach().numpy())
    assert relative_difference(gradients(loaded), expected) < 1e-6
    report = Trainer(make_loaded(), LearnConfig()).update([batch], objective)
    assert "old_logprobs" in report.seconds, "a single step needs them before it, too"


def test_masked_labels_are_counted_by_batch_and_have_no_gradient() -> None:
    loaded, batch = make_loaded(), some_batch()
    logp_N = Trainer(loaded, LearnConfig()).logprobs(batch)
    far_N = np.arange(batch.num_labels) % 3 == 0
    shifted = dataclasses.replace(batch, logp_sampler_N=(logp_N + np.where(far_N, 3.0, 0.1)).astype(np.float32))
    silent = dataclasses.replace(shifted, weight_N=np.where(far_N, 0.0, shifted.weight_N).astype(np.float32))
    objective = Objective(importance_mask=4.0, learning_rate=0.01)
    reports, found = [], []
    for one in (shifted, silent):
        mine = make_loaded()
        trainer = Trainer(mine, LearnConfig())
        trainer.accumulate(one, objective)
        found.append(gradients(mine))
        reports.append(trainer.update([one], objective))
    assert list(reports[0].num_masked) == [int(far_N.sum())] and list(reports[1].num_masked) == [0]
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-4)  # a float32 sum over other passes
    assert relative_difference(*found) < 1e-5


def test_recorded_log_probs_make_the_ratio_of_the_first_step_that_to_the_sampler() -> None:
    batch = some_batch()
    logp_N = Trainer(make_loaded(), LearnConfig()).logprobs(batch)
    shifted = dataclasses.replace(
        batch, logp_sampler_N=(logp_N - 1.0).astype(np.float32), credit_N=np.ones(batch.num_labels, np.float32)
    )
    objective = Objective(surrogate="ppo_clip", old_logprobs="recorded", learning_rate=0.01)
    report = Trainer(make_loaded(), LearnConfig()).update([shifted], objective)
    assert (report.clip_high_fraction, report.clip_low_fraction, report.clip_fraction) == (1.0, 0.0, 1.0)
    assert report.gap_mean == pytest.approx(1.0, rel=1e-4) and report.grad_norm == 0.0
    recomputed = dataclasses.replace(objective, old_logprobs="recomputed")
    assert Trainer(make_loaded(), LearnConfig()).update([shifted], recomputed).clip_fraction == 0.0


def with_targets(batch: Batch) -> Batch:
    num = len(batch.sequences)
    target_A = np.random.default_rng(5).normal(1.0, 0.5, num).astype(np.float32)
    return dataclasses.replace(batch, value_A=np.zeros(num, np.float32), target_A=target_A)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_critic_begins_at_zero_learns_its_targets_and_is_of_no_policy(lora: LoraConfig | None, dtype: str) -> None:
    loaded = make_loaded(lora=lora, dtype=dtype)  # type: ignore[arg-type]
    trainer = Trainer(loaded, LearnConfig(algorithm="ppo"))
    batch = with_targets(some_batch())
    assert trainer.critic is not None and not any("critic" in name for name in loaded.trainable())
    has_label = np.bincount(batch.action_N, minlength=len(batch.sequences)) > 0
    before = trainer.values(batch)
    assert (before[has_label] == 0).all() and np.isnan(before[~has_label]).all()
    objective = Objective(surrogate="ppo_clip", value_coef=0.1, value_learning_rate=0.05, learning_rate=1e-3)
    losses = [trainer.update([batch], objective).value_loss for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0], losses
    with pytest.raises(LearningError, match="no critic"):
        Trainer(make_loaded(), LearnConfig()).values(batch)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_a_resumed_critic_goes_on_bit_by_bit(tiny_folder: Path, tmp_path: Path, lora: LoraConfig | None) -> None:
    learn = LearnConfig(algorithm="ppo")
    steps = [with_targets(some_batch(seed)) for seed in range(4)]
    objective = Objective(surrogate="ppo_clip", value_coef=0.1, value_learning_rate=0.02, learning_rate=0.01)
    straight = load_model(tiny_folder, dtype="float32", lora=lora)
    trainer = Trainer(straight, learn)
    seen = []
    for number, batch in enumerate(steps):
        if number == 2:
            checkpoint.save(tmp_path / "c", straight, trainer)
        report = trainer.update([batch], objective)
        seen.append((report.loss, report.value_loss))
    again = Trainer(load_model(tiny_folder, dtype="float32", lora=lora), learn)
    checkpoint.load(tmp_path / "c", again.loaded, again)
    resumed = [again.update([batch], objective) for batch in steps[2:]]
    assert [(r.loss, r.value_loss) for r in resumed] == seen[2:]
    assert np.array_equal(again.values(steps[0]), trainer.values(steps[0]), equal_nan=True)
    other = load_model(tiny_folder, dtype="float32", lora=lora)
    with pytest.raises(CheckpointError, match="of another model"):
        checkpoint.load(tmp_path / "c", other, Trainer(other, LearnConfig()))
