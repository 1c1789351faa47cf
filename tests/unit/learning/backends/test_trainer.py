"""The trainer against an independent plain computation, and what it refuses."""

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
from torch import nn

from leyden.base.config import LearnConfig, LoraConfig
from leyden.base.errors import LearningError, ObjectiveError
from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel
from leyden.learning.backends.embedded.model import ComputeType, LoadedModel, parameter_fingerprint
from leyden.learning.backends.embedded.precision import LowLinear
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.batch import Batch

LAYOUTS = ("single", "padded", "packed", "tree", "depth_first")


def some_batch(seed: int = 0, num: int = 8) -> Batch:
    rng = np.random.default_rng(seed)
    return make_batch(random_sequences(rng, num), rng)


def plain_logprobs(loaded: LoadedModel, batch: Batch) -> torch.Tensor:
    """One action at a time, all logits, no sharing; shape (N,)."""
    parts = []
    for a, sequence in enumerate(batch.sequences):
        ids_BT = torch.from_numpy(sequence.astype(np.int64))[None]
        with attention_scope(causal_kernel):
            logits_TV = loaded.causal(input_ids=ids_BT, use_cache=False).logits[0]
        log_p_TV = torch.log_softmax(logits_TV / float(batch.temperature_A[a]), -1)
        places = range(int(batch.prompt_len_A[a]), len(sequence))
        parts.append(torch.stack([log_p_TV[p - 1, sequence[p]] for p in places]) if places else log_p_TV[:0, 0])
    return torch.cat(parts)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma"])
def test_gradient_and_logprobs_are_those_of_a_plain_computation(kind: str, layout: str) -> None:
    loaded = make_loaded(kind)
    loaded.model.double()
    batch = some_batch()
    trainer = Trainer(loaded, LearnConfig(layout=layout, token_budget=40))
    logp_N = plain_logprobs(loaded, batch)
    assert np.allclose(trainer.logprobs(batch), logp_N.detach().numpy(), rtol=1e-6)
    sampler_N = torch.from_numpy(batch.logp_sampler_N.astype(np.float64))
    weight_N = torch.exp(logp_N.detach() - sampler_N).clamp(max=2.0).nan_to_num(nan=1.0)
    scale_N = torch.from_numpy(batch.weight_N * batch.credit_N.astype(np.float64))
    (-(scale_N * weight_N * logp_N)).sum().backward()  # type: ignore[no-untyped-call]
    expected = gradients(loaded)
    trainer.accumulate(batch, Objective(), logp_old_N=logp_N.detach().numpy())
    assert relative_difference(gradients(loaded), expected) < 1e-6


def test_one_step_of_the_optimizer_is_adamw_with_a_clipped_gradient() -> None:
    ours, theirs = make_loaded(), make_loaded()
    batch, objective = some_batch(), Objective(learning_rate=0.01, grad_clip=0.5)
    report = Trainer(ours, LearnConfig(weight_decay=0.1)).update([batch], objective)
    Trainer(theirs, LearnConfig()).accumulate(batch, objective)
    norm = nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.5)
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-5) and report.grad_norm > 0.5
    groups = [
        {"params": [p for p in theirs.model.parameters() if (p.ndim >= 2) == big], "weight_decay": 0.1 * big}
        for big in (True, False)
    ]
    torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8).step()
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_the_token_budget_changes_the_number_of_tokens_but_not_the_gradient() -> None:
    loaded = make_loaded()
    loaded.model.double()
    batch = some_batch(num=14)
    found = []
    for budget in (16, 50, 4096):
        Trainer(loaded, LearnConfig(token_budget=budget)).accumulate(batch, Objective(entropy=0.1))
        found.append(gradients(loaded))
    assert relative_difference(found[0], found[2]) < 1e-9
    assert relative_difference(found[1], found[2]) < 1e-9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_are_bit_identical(dtype: ComputeType) -> None:
    prints = []
    for _ in range(2):
        loaded = make_loaded(dtype=dtype)
        trainer = Trainer(loaded, LearnConfig(token_budget=64))
        reports = [trainer.update([some_batch(s)], Objective(learning_rate=0.01)) for s in range(3)]
        prints.append(([r.loss for r in reports], parameter_fingerprint(loaded.model)))
    assert prints[0] == prints[1]


def test_after_an_update_the_sampler_reads_the_new_weights() -> None:
    loaded = make_loaded(dtype="bfloat16")
    Trainer(loaded, LearnConfig()).update([some_batch()], Objective(learning_rate=0.05, kl=0.1))
    layers = [m for m in loaded.model.modules() if isinstance(m, LowLinear)]
    assert len(layers) == 2 * 7 + 1
    for layer in layers:
        assert torch.equal(layer.low_weight(), layer.weight.bfloat16())


def test_bfloat16_has_nearly_the_gradient_of_float32() -> None:
    low, full = make_loaded(dtype="bfloat16"), make_loaded()
    Trainer(low, LearnConfig()).accumulate(some_batch(), Objective(surrogate="nll"))
    Trainer(full, LearnConfig()).accumulate(some_batch(), Objective(surrogate="nll"))
    assert relative_difference(gradients(low), gradients(full)) < 0.1


def test_old_logprobs_are_those_before_the_first_of_several_steps() -> None:
    loaded, batch = make_loaded(), some_batch()
    objective = Objective(surrogate="ppo_clip", learning_rate=0.05, importance_cap=0.0, clip_low=0.01, clip_high=0.01)
    one = Trainer(make_loaded(), LearnConfig()).update([batch], objective)
    assert one.clip_fraction == 0 and one.num_optimizer_steps == 1
    assert "old_logprobs" not in one.seconds
    report = Trainer(loaded, LearnConfig()).update([batch, batch], objective)
    assert report.num_optimizer_steps == 2
    # The second step starts where the ratio has moved; were old the current policy, nothing would be clipped.
    assert report.clip_fraction > 0.1
    assert report.num_forward_tokens == pytest.approx(3 * one.num_forward_tokens)


def test_kl_is_zero_at_the_start_and_measured_from_there() -> None:
    loaded = make_loaded(lora=LoraConfig(rank=4))
    trainer = Trainer(loaded, LearnConfig())
    objective = Objective(learning_rate=0.05, kl=0.1)
    first = trainer.update([some_batch()], objective)
    start = parameter_fingerprint(loaded.model)
    second = trainer.update([some_batch()], objective)
    assert first.kl == pytest.approx(0.0, abs=1e-6) and second.kl > 1e-4
    assert parameter_fingerprint(loaded.model) != start


def test_lora_trains_its_own_parameters_and_leaves_the_base_alone() -> None:
    loaded = make_loaded(lora=LoraConfig(rank=4), dtype="bfloat16")
    before = {n: p.detach().clone() for n, p in loaded.model.named_parameters()}
    trainer = Trainer(loaded, LearnConfig())
    reports = [trainer.update([some_batch()], Objective(surrogate="nll", learning_rate=0.02)) for _ in range(3)]
    assert reports[-1].loss != reports[0].loss
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name), name


def test_the_report_measures_the_gap_to_the_sampler_before_the_update() -> None:
    loaded, batch = make_loaded(), some_batch()
    logp_N = Trainer(loaded, LearnConfig()).logprobs(batch)
    shifted = dataclasses.replace(batch, logp_sampler_N=logp_N + np.float32(0.25))
    for batches in ([shifted], [shifted, shifted]):
        report = Trainer(make_loaded(), LearnConfig()).update(batches, Objective(learning_rate=0.05))
        assert report.gap_mean == pytest.approx(0.25, rel=1e-3)
        assert report.gap_max == pytest.approx(0.25, rel=1e-3)
    exact = dataclasses.replace(batch, logp_sampler_N=logp_N - np.float32(5))
    assert Trainer(make_loaded(), LearnConfig()).update([exact], Objective()).importance_capped == 1.0


def test_labels_without_credit_take_no_forward_pass_and_nothing_at_all_is_no_step() -> None:
    loaded, batch = make_loaded(), some_batch()
    before = parameter_fingerprint(loaded.model)
    empty = dataclasses.replace(batch, credit_N=np.zeros_like(batch.credit_N))
    report = Trainer(loaded, LearnConfig()).update([empty], Objective())
    assert (report.num_optimizer_steps, report.num_forward_tokens, report.num_labels) == (
        0,
        0,
        batch.num_labels,
    )
    assert parameter_fingerprint(loaded.model) == before
    assert Trainer(loaded, LearnConfig()).update([empty], Objective(entropy=0.1)).num_optimizer_steps == 1
    assert Trainer(loaded, LearnConfig()).update([], Objective()).num_optimizer_steps == 0


def test_a_loss_that_is_not_finite_is_refused_before_the_weights_change() -> None:
    loaded = make_loaded()
    trainer = Trainer(loaded, LearnConfig())
    trainer.update([some_batch()], Objective())
    with torch.no_grad():
        next(iter(trainer.parameters.values()))[5].fill_(float("inf"))
    before = parameter_fingerprint(loaded.model)
    with pytest.raises(LearningError, match=r"optimizer step 2 has loss nan.*learn\.learning_rate"):
        trainer.update([some_batch()], Objective())
    assert parameter_fingerprint(loaded.model) == before
    assert trainer.num_steps == 1
    assert not any(p.grad.any() for p in trainer.parameters.values() if p.grad is not None)


def test_a_batch_of_another_model_or_of_greedy_samples_is_refused() -> None:
    loaded, batch = make_loaded(), some_batch()
    trainer = Trainer(loaded, LearnConfig())
    greedy = dataclasses.replace(batch, temperature_A=np.zeros_like(batch.temperature_A))
    with pytest.raises(ObjectiveError, match="temperature 0"):
        trainer.update([greedy], Objective())
    foreign = [np.where(np.arange(len(s)) == 0, 64, s).astype(np.int32) for s in batch.sequences]
    with pytest.raises(ObjectiveError, match="token id 64"):
        trainer.update([dataclasses.replace(batch, sequences=foreign)], Objective())
    long = make_batch([(np.zeros(300, np.int32), 290)], np.random.default_rng(0))
    with pytest.raises(ObjectiveError, match="300 tokens"):
        trainer.logprobs(long)
